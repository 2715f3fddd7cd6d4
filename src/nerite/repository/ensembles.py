"""Keeps ensembles in line with the models that they are put together from, which come, change and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nerite.config.loading import LoadedModel, Remark
from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy
from nerite.config.validate_ensemble import EnsembleCandidate, circular_ensembles, find_step_models, is_decoupled
from nerite.models.running_version import RunningVersion
from nerite.repository import refusals
from nerite.repository.catalogue import Catalogue, EnsembleDefinition, ModelRecord, StepTarget, find_targets
from nerite.repository.version_maker import VersionMaker
from nerite.scheduling.ensemble import StepModel

_log = logging.getLogger("nerite.repository")


class EnsembleLinker:
    """For the loop's thread only. Nothing here waits: an ensemble has nothing of its own that takes time to load."""

    def __init__(
        self,
        catalogue: Catalogue,
        maker: VersionMaker,
        serve: Callable[[ModelRecord, dict[int, RunningVersion]], list[asyncio.Task[None]]],
        withdraw: Callable[[ModelRecord], list[asyncio.Task[None]]],
    ) -> None:
        """``serve`` sends requests to new versions; ``withdraw`` sends none any more. Both return what is under way."""
        self._catalogue = catalogue
        self._maker = maker
        self._serve = serve
        self._withdraw = withdraw

    def put_together(self, record: ModelRecord, assembly: EnsembleDefinition, mistakes: Sequence[Mistake]) -> None:
        """Have an ensemble run as its files say, which have these ``mistakes``. Raises ``NeriteError``.

        What ran goes on then; if nothing did, the ensemble runs once its models are as it needs them.
        """
        targets: list[StepTarget] = []
        if not mistakes:
            targets, mistakes = self._targets(record, assembly)
        if mistakes:
            if not record.running:
                record.assembly = assembly
            raise refusals.unfit(record, mistakes)
        if not record.running or record.assembly != assembly or record.parts != _essence(targets):
            self._serve(record, self._made(record, assembly, targets))

    def revise(self, changed: Iterable[str]) -> list[asyncio.Task[None]]:
        """See to the ensembles that need models which came, changed or went, by name.

        Returns what is under way of those that could not go on, or not as they were.
        """
        closing: list[asyncio.Task[None]] = []
        names = set(changed)
        while names:
            affected = [record for name in names for record in self.dependents(name)]
            names = set()
            for record in affected:
                assert record.assembly is not None
                targets, mistakes = self._targets(record, record.assembly)
                if not mistakes and not (record.running and record.parts == _essence(targets)):
                    closing += self._serve(record, self._made(record, record.assembly, targets))
                elif mistakes and record.running:
                    _log.error("%s", mistakes[0])
                    record.unreadable = str(mistakes[0])
                    closing += self._withdraw(record)
                else:
                    continue
                names.add(record.name)
        return closing

    def dependents(self, name: str) -> list[ModelRecord]:
        """Return the ensembles that need models of a name, whether they run or wait for it."""
        return [
            record
            for record in self._catalogue
            if record.assembly is not None and any(step.model_name == name for step in record.assembly.steps)
        ]

    def spare_without(self, record: ModelRecord) -> list[ModelRecord]:
        """Return the models that are there for the sake of ``record`` alone; those that need others come first."""
        leaving = [record]
        for ensemble in leaving:
            for part in self._parts(ensemble):
                if part is None or part in leaving or part.asked:
                    continue
                if all(each in leaving for each in self.dependents(part.name) if part in self._parts(each)):
                    leaving.append(part)
        return leaving[1:]

    def _parts(self, ensemble: ModelRecord) -> list[ModelRecord | None]:
        steps = ensemble.assembly.steps if ensemble.assembly is not None else ()
        return [self._catalogue.part(ensemble.namespace, step.model_namespace, step.model_name) for step in steps]

    def _targets(self, record: ModelRecord, assembly: EnsembleDefinition) -> tuple[list[StepTarget], list[Mistake]]:
        """Return what the steps of an ensemble go to, which tells it how it runs from now on, and what is wrong."""
        targets, mistakes = find_targets(assembly, record.namespace, self._catalogue)
        for _, running in targets if not mistakes else ():
            running.tell_witnesses()
        return targets, mistakes

    def _made(
        self, record: ModelRecord, assembly: EnsembleDefinition, targets: Sequence[StepTarget]
    ) -> dict[int, RunningVersion]:
        config, signature = assembly.finished(targets)
        parts = [StepModel(running.signature, running.decoupled, running.worker) for _, running in targets]
        record.assembly, record.parts = assembly, _essence(targets)
        return {
            version: self._maker.assemble(record.name, version, config, signature, parts)
            for version in assembly.versions
        }


def _essence(targets: Sequence[StepTarget]) -> tuple[object, ...]:
    """Return what an ensemble builds upon. A model may change in other ways without the ensemble noticing."""
    return tuple(
        (
            namespace,
            part.signature.max_batch_size,
            part.signature.inputs,
            part.signature.outputs,
            part.decoupled,
            part.worker,
        )
        for namespace, part in targets
    )


# What a load would find wrong between ensembles and their models: told from their files, with nothing that runs.

Key: TypeAlias = tuple[Path, str]
"""The repository of a model, and its name."""
_WRONG = "which has mistakes of its own"
_UNCHECKED = "which could not be checked itself"
_UNCERTAIN = "which is not completed here; --disable-auto-complete-config takes what is written"


class DescribedModel(NamedTuple):
    """A model as its files describe it."""

    loaded: LoadedModel
    sound: bool
    """Nothing is wrong with it by itself."""


class EnsembleVerdict(NamedTuple):
    """What there is to say of a model that stands beside the others."""

    configs: Mapping[int, ModelConfig]
    """The complete configurations of its versions, if it can be loaded."""
    unknown: str = ""
    """Why there are none: something that is told elsewhere."""
    mistakes: Sequence[Mistake] = ()
    remarks: Sequence[Remark] = ()


class EnsembleSurvey:
    """The models of some repositories, and what is wrong between them."""

    def __init__(self, models: Mapping[Key, DescribedModel]) -> None:
        self._models = models
        self._verdicts: dict[Key, EnsembleVerdict] = {}

    def verdict(self, key: Key) -> EnsembleVerdict:
        """Return what there is to say of a model. What is wrong with it by itself is not repeated."""
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(key)
        return self._verdicts[key]

    def _judge(self, key: Key) -> EnsembleVerdict:
        loaded, sound = self._models[key]
        if not sound:
            return EnsembleVerdict({}, _WRONG)
        if not loaded.certain:
            return EnsembleVerdict({}, _UNCERTAIN)
        if loaded.polled.config.ensemble_scheduling is None:
            return EnsembleVerdict(loaded.configs)
        before = self._before(key)
        if before:
            return _refused(loaded, [circular_ensembles(key[1], before)])
        parts = self._parts(key)
        verdicts = {part: self.verdict(part) for part in parts if part is not None}
        unknown = {name: verdict.unknown for (_, name), verdict in verdicts.items() if verdict.unknown}
        if unknown and None not in parts:
            remarks = [Remark("note", f"not checked against '{name}', {why}") for name, why in unknown.items()]
            return EnsembleVerdict({}, _UNCHECKED, remarks=remarks)
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


def _candidate(name: str, verdict: EnsembleVerdict) -> EnsembleCandidate:
    return EnsembleCandidate(name, verdict.configs, max(verdict.configs, default=-1))


def _wired(loaded: LoadedModel, candidates: Sequence[EnsembleCandidate | None]) -> EnsembleVerdict:
    (config, *_) = loaded.configs.values()
    parts, mistakes = find_step_models(config, candidates)
    if mistakes:
        return _refused(loaded, mistakes)
    policy = ModelTransactionPolicy(decoupled=any(map(is_decoupled, parts)))
    return EnsembleVerdict(
        {version: replace(each, model_transaction_policy=policy) for version, each in loaded.configs.items()}
    )


def _refused(loaded: LoadedModel, mistakes: Sequence[Mistake]) -> EnsembleVerdict:
    return EnsembleVerdict({}, _WRONG, loaded.polled.text.source.place(mistakes))
