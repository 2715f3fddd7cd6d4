"""TorchScript: an archive with code in it, which runs without the Python program that it was made from."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig


def recognise(candidate: Candidate) -> Artifact | None:
    """Return what ``torch.jit.save`` has written."""
    members = candidate.members
    if "data.pkl" not in members or not any(name.startswith("code/") for name in members):
        return None
    config = ModelConfig(backend="pytorch", platform="pytorch_libtorch")
    return Artifact("TorchScript program", candidate.path, candidate.name, config, {"model.pt": candidate.path})
