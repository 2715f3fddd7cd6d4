"""A directory of a Triton model repository: it has versions, and perhaps a configuration, already."""

from __future__ import annotations

from pathlib import Path

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.config.loading import CONFIG_FILE
from nerite.config.versions import find_versions


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a model with all its versions."""
    path = candidate.path
    if not candidate.is_directory:
        return None
    directories = [child.name for child in path.iterdir() if child.is_dir()]
    numbers = find_versions(directories).numbers
    configured = (path / CONFIG_FILE).is_file()
    if not numbers:
        if configured:
            remedy = f"Put the model's files into {path / '1'}."
            raise Unusable(path, f"there is a {CONFIG_FILE}, and no version", remedy)
        _refuse_a_repository(path)
        return None
    versions = {number: path / str(number) for number in numbers}
    beside = {
        child.name: child
        for child in sorted(path.iterdir())
        if not child.name.startswith(".") and child not in versions.values()
    }
    return Artifact("model directory", path, candidate.name, beside=beside, versions=versions, finished=configured)


def _refuse_a_repository(path: Path) -> None:
    models = sorted(child.parent.name for child in path.glob(f"*/{CONFIG_FILE}"))
    if models:
        remedy = f"Serve it as it is: nerite serve {path}. Or add one of them: nerite add {path / models[0]}"
        raise Unusable(path, f"this is a repository of {len(models)} models, not a model", remedy)
