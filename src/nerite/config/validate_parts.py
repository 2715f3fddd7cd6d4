"""Whether the models are there that an ensemble is put together from, in the versions that it asks for, and fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.scheduling_choice import EnsembleStep
from nerite.config.validate_wiring import check_wiring


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that a step may go to."""

    name: str
    configs: Mapping[int, ModelConfig]
    """Its versions that can be asked, with their complete configurations."""
    latest: int = -1
    failure: str = ""
    """Why there is no version, in the words in which a load says so."""

    def version(self, step: EnsembleStep) -> int | None:
        """Return the version that a step means; None if it is not there."""
        wanted = self.latest if step.model_version < 0 else step.model_version
        return wanted if wanted in self.configs else None


def find_parts(config: ModelConfig, candidates: Sequence[Candidate | None]) -> tuple[list[ModelConfig], list[Mistake]]:
    """Return what the steps go to, and what is wrong: with one of the models, or else between them.

    A candidate that is None is a model that there is not.
    """
    assert config.ensemble_scheduling is not None
    steps = config.ensemble_scheduling.step
    missing = [index for index, candidate in enumerate(candidates) if candidate is None]
    if missing:
        return [], [_missing(config.name, steps, missing)]
    mistakes: list[Mistake] = []
    parts: list[ModelConfig] = []
    for index, (step, candidate) in enumerate(zip(steps, candidates, strict=True)):
        assert candidate is not None
        version = candidate.version(step)
        if version is None:
            mistakes.append(_absent(config.name, step, candidate, index))
        else:
            parts.append(candidate.configs[version])
    return parts, mistakes or list(check_wiring(config, parts))


def circular(ensemble: str, before: str) -> Mistake:
    """Return the mistake of an ensemble that is a part of itself, ``before`` being the last on the way back."""
    return Mistake(
        message=f"circular dependency between ensembles: {ensemble} -> ... -> {before} -> {ensemble}",
        path=("ensemble_scheduling",),
        remedy="Take the step out that leads back: no ensemble can be a part of itself.",
    )


def _missing(ensemble: str, steps: Sequence[EnsembleStep], missing: Sequence[int]) -> Mistake:
    names = ", ".join(dict.fromkeys(steps[index].model_name for index in missing))
    return Mistake(
        message=f"ensemble {ensemble} contains models that are not available or ambiguous: {names}",
        path=_path(missing[0]),
        remedy="Put the model into the repository and load it, or correct the name.",
    )


def _absent(ensemble: str, step: EnsembleStep, candidate: Candidate, index: int) -> Mistake:
    start = f"ensemble '{ensemble}' depends on '{candidate.name}'"
    if candidate.configs:
        there = ", ".join(map(str, sorted(candidate.configs)))
        return Mistake(
            message=f"{start} whose required version {step.model_version} is not loaded.",
            path=(*_path(index), "model_version"),
            remedy=f"Write model_version: -1 for the latest version, or one that is loaded: {there}.",
        )
    return Mistake(
        message=f"{start} {candidate.failure}",
        path=(*_path(index), "model_name"),
        remedy=f"Make '{candidate.name}' load first.",
    )


def _path(step: int) -> FieldPath:
    return ("ensemble_scheduling", "step", step)
