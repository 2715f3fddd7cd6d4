"""What a load would find wrong between ensembles and their models: told from their files, with nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nerite.config.loading import LoadedModel, Remark
from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy
from nerite.config.validate_parts import Candidate, circular, find_parts
from nerite.config.validate_wiring import is_decoupled

Key: TypeAlias = tuple[Path, str]
"""The repository of a model, and its name."""
_WRONG = "which has mistakes of its own"
_UNCHECKED = "which could not be checked itself"
_UNCERTAIN = "which is not completed here; --disable-auto-complete-config takes what is written"


class Described(NamedTuple):
    """A model as its files describe it."""

    loaded: LoadedModel
    sound: bool
    """Nothing is wrong with it by itself."""


class Verdict(NamedTuple):
    """What there is to say of a model that stands beside the others."""

    configs: Mapping[int, ModelConfig]
    """The complete configurations of its versions, if it can be loaded."""
    unknown: str = ""
    """Why there are none: something that is told elsewhere."""
    mistakes: Sequence[Mistake] = ()
    remarks: Sequence[Remark] = ()


class EnsembleSurvey:
    """The models of some repositories, and what is wrong between them."""

    def __init__(self, models: Mapping[Key, Described]) -> None:
        self._models = models
        self._verdicts: dict[Key, Verdict] = {}

    def verdict(self, key: Key) -> Verdict:
        """Return what there is to say of a model. What is wrong with it by itself is not repeated."""
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(key)
        return self._verdicts[key]

    def _judge(self, key: Key) -> Verdict:
        loaded, sound = self._models[key]
        if not sound:
            return Verdict({}, _WRONG)
        if not loaded.certain:
            return Verdict({}, _UNCERTAIN)
        if loaded.polled.config.ensemble_scheduling is None:
            return Verdict(loaded.configs)
        before = self._before(key)
        if before:
            return _refused(loaded, [circular(key[1], before)])
        parts = self._parts(key)
        verdicts = {part: self.verdict(part) for part in parts if part is not None}
        unknown = {name: verdict.unknown for (_, name), verdict in verdicts.items() if verdict.unknown}
        if unknown and None not in parts:
            remarks = [Remark("note", f"not checked against '{name}', {why}") for name, why in unknown.items()]
            return Verdict({}, _UNCHECKED, remarks=remarks)
        return _wired(loaded, [part and _candidate(part[1], verdicts[part]) for part in parts])

    def _parts(self, key: Key) -> list[Key | None]:
        """Return the models of the steps: beside the ensemble, or the only one of that name."""
        ensemble = self._models[key].loaded.polled.config.ensemble_scheduling
        return [self._part(key, step.model_name) for step in (ensemble.step if ensemble is not None else ())]

    def _part(self, key: Key, name: str) -> Key | None:
        named = [each for each in self._models if each[1] == name]
        neighbours = [each for each in named if each[0] == key[0]]
        return next(iter(neighbours or (named if len(named) == 1 else ())), None)

    def _before(self, key: Key) -> str:
        """Return the last ensemble on the way on which one leads back to itself; empty if it does not."""
        reached = [key]
        for each in reached:
            for part in self._parts(each):
                if part == key:
                    return each[1]
                if part is not None and part not in reached:
                    reached.append(part)
        return ""


def _candidate(name: str, verdict: Verdict) -> Candidate:
    return Candidate(name, verdict.configs, max(verdict.configs, default=-1))


def _wired(loaded: LoadedModel, candidates: Sequence[Candidate | None]) -> Verdict:
    (config, *_) = loaded.configs.values()
    parts, mistakes = find_parts(config, candidates)
    if mistakes:
        return _refused(loaded, mistakes)
    policy = ModelTransactionPolicy(decoupled=any(map(is_decoupled, parts)))
    return Verdict(
        {version: replace(each, model_transaction_policy=policy) for version, each in loaded.configs.items()}
    )


def _refused(loaded: LoadedModel, mistakes: Sequence[Mistake]) -> Verdict:
    return Verdict({}, _WRONG, loaded.polled.text.source.place(mistakes))
