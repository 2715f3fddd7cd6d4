"""What all kinds of forests have in common: the backend ``fil``, which is told which of them it gets."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig, ModelParameter


def forest(candidate: Candidate, kind: str, filename: str, model_type: str) -> Artifact:
    """Return a forest whose file is to be called ``filename``; ``model_type`` is FIL's word for it."""
    config = ModelConfig(backend="fil", parameters={"model_type": ModelParameter(string_value=model_type)})
    return Artifact(kind, candidate.path, candidate.name, config, {filename: candidate.path})
