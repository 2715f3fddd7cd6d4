"""What ``torch.export`` and AOTInductor write: a graph, or compiled code, in an archive."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig

_GRAPHS = ("models/model.json", "serialized_exported_program.json")
"""Where the graph is: in archives of today, and of torch before 2.8."""


def recognise(candidate: Candidate) -> Artifact | None:
    """Return an exported program, or a package of compiled code."""
    members = candidate.members
    compiled = any(name.startswith("data/aotinductor/") and name.endswith(".so") for name in members)
    exported = any(name in members for name in _GRAPHS) or (
        "archive_format" in members and any(name.startswith("models/") for name in members)
    )
    if not compiled and not exported:
        return None
    kind = "AOTInductor package" if compiled else "exported PyTorch program"
    remarks = ("It runs on machines like the one that it was compiled on.",) if compiled else ()
    config = ModelConfig(backend="pytorch", platform="torch_aoti")
    files = {"model.pt2": candidate.path}
    return Artifact(kind, candidate.path, candidate.name, config, files, remarks=remarks)
