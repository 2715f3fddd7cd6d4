"""Keeps ensembles up to date as the models of their steps are loaded, changed and unloaded.

``EnsembleLinker`` does this for running models; ``EnsembleSurvey`` checks ensembles from their files alone.
"""

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
from nerite.routes.table import RouteTable
from nerite.scheduling.ensemble import StepModel
from nerite.scheduling.weighted_route import WeightedRoute

_log = logging.getLogger("nerite.repository")


class EnsembleLinker:
    """Links ensembles to the running models of their steps. For the loop's thread only.

    Nothing here awaits: an ensemble has no resources of its own that take time to load.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        maker: VersionMaker,
        serve: Callable[[ModelRecord, dict[int, RunningVersion]], list[asyncio.Task[None]]],
        withdraw: Callable[[ModelRecord], list[asyncio.Task[None]]],
        routes: RouteTable,
    ) -> None:
        """``serve`` routes requests to new versions; ``withdraw`` stops routing. Both return the tasks that drain."""
        self._catalogue = catalogue
        self._maker = maker
        self._serve = serve
        self._withdraw = withdraw
        self._routes = routes

    def put_together(self, record: ModelRecord, assembly: EnsembleDefinition, mistakes: Sequence[Mistake]) -> None:
        """Build and serve an ensemble; ``mistakes`` are those already found in its files.

        Raises ``NeriteError`` if it cannot be built. A running version then continues; if none runs, the ensemble
        starts as soon as its models allow it.
        """
        targets: list[StepTarget] = []
        if not mistakes:
            targets, mistakes = self._targets(record, assembly)
        if mistakes:
            if not record.running:
                record.assembly = assembly
            raise refusals.unfit(record, mistakes)
        if not record.running or record.assembly != assembly or record.parts != _link_key(targets):
            self._serve(record, self._build(record, assembly, targets))

    def revise(self, changed: Iterable[str]) -> list[asyncio.Task[None]]:
        """Rebuild or withdraw the ensembles that need models whose state changed, by name.

        Returns the tasks that drain the versions which were replaced or withdrawn.
        """
        closing: list[asyncio.Task[None]] = []
        names = set(changed)
        while names:
            affected = [record for name in names for record in self.dependents(name)]
            names = set()
            for record in affected:
                assert record.assembly is not None
                targets, mistakes = self._targets(record, record.assembly)
                if not mistakes and not (record.running and record.parts == _link_key(targets)):
                    closing += self._serve(record, self._build(record, record.assembly, targets))
                elif mistakes and record.running:
                    _log.error("%s", mistakes[0])
                    record.unreadable = str(mistakes[0])
                    closing += self._withdraw(record)
                else:
                    continue
                names.add(record.name)
        return closing

    def dependents(self, name: str) -> list[ModelRecord]:
        """Return the ensembles that need a model of this name, whether they run or wait for it."""
        names = {name, *(route.name for route in self._routes if any(arm.model == name for arm in route.arms))}
        return [
            record
            for record in self._catalogue
            if record.assembly is not None and any(step.model_name in names for step in record.assembly.steps)
        ]

    def spare_without(self, record: ModelRecord) -> list[ModelRecord]:
        """Return the models loaded only because ``record`` needs them; dependents come before their dependencies."""
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
        """Return the running models of an ensemble's steps, and the mistakes that prevent it from running.

        If there are none, those models report execution times to the steps' sinks from now on.
        """
        targets, mistakes = find_targets(assembly, record.namespace, self._catalogue)
        for _, running in targets if not mistakes else ():
            running.notify_observers()
        return targets, mistakes

    def _build(
        self, record: ModelRecord, assembly: EnsembleDefinition, targets: Sequence[StepTarget]
    ) -> dict[int, RunningVersion]:
        config, signature = assembly.finished(targets)
        parts = [StepModel(running.signature, running.decoupled, _device(running)) for _, running in targets]
        record.assembly, record.parts = assembly, _link_key(targets)
        return {
            version: self._maker.assemble(record.name, version, config, signature, parts)
            for version in assembly.versions
        }


def _device(running: RunningVersion) -> int | None:
    placement = running.device_placement
    return None if placement is None else placement.device


def _link_key(targets: Sequence[StepTarget]) -> tuple[object, ...]:
    """Return the properties of its models that an ensemble depends on; other changes need no rebuild."""
    return tuple(
        (
            namespace,
            part.signature.max_batch_size,
            part.signature.inputs,
            part.signature.outputs,
            part.decoupled,
            _device(part),
        )
        for namespace, part in targets
    )


# Static check of ensembles against their models, as a load would do it: from the files, without running anything.

Key: TypeAlias = tuple[Path, str]
"""Repository and name of a model."""
_HAS_MISTAKES = "which has mistakes of its own"
_UNCHECKED = "which could not be checked itself"
_UNCERTAIN = "which is not completed here; use --disable-auto-complete-config to check it as written"


class DescribedModel(NamedTuple):
    """A model as its files describe it."""

    loaded: LoadedModel
    sound: bool
    """True if the model by itself has no mistakes."""


class EnsembleVerdict(NamedTuple):
    """Result of checking a model against the other models."""

    configs: Mapping[int, ModelConfig]
    """The complete configurations of its versions; empty if it cannot be loaded or checked."""
    unknown: str = ""
    """Why there are no configurations, if the cause is reported elsewhere."""
    mistakes: Sequence[Mistake] = ()
    remarks: Sequence[Remark] = ()


class EnsembleSurvey:
    """Checks the models of some repositories against each other."""

    def __init__(self, models: Mapping[Key, DescribedModel], routes: Mapping[str, WeightedRoute]) -> None:
        """``routes`` are the names that only a route has: a step on one is checked against its heaviest arm."""
        self._models = models
        self._routes = routes
        self._verdicts: dict[Key, EnsembleVerdict] = {}

    def verdict(self, key: Key) -> EnsembleVerdict:
        """Return the verdict on a model, without the mistakes of the model by itself."""
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(key)
        return self._verdicts[key]

    def _judge(self, key: Key) -> EnsembleVerdict:
        loaded, sound = self._models[key]
        if not sound:
            return EnsembleVerdict({}, _HAS_MISTAKES)
        if not loaded.certain:
            return EnsembleVerdict({}, _UNCERTAIN)
        if loaded.polled.config.ensemble_scheduling is None:
            return EnsembleVerdict(loaded.configs)
        before = self._cycle_predecessor(key)
        if before:
            return _refused(loaded, [circular_ensembles(key[1], before)])
        parts = self._parts(key)
        verdicts = {part: self.verdict(part) for part in parts if part is not None}
        unknown = {name: verdict.unknown for (_, name), verdict in verdicts.items() if verdict.unknown}
        if unknown and None not in parts:
            remarks = [Remark("note", f"not checked against '{name}', {why}") for name, why in unknown.items()]
            return EnsembleVerdict({}, _UNCHECKED, remarks=remarks)
        return _linked(loaded, [part and _candidate(part[1], verdicts[part]) for part in parts])

    def _parts(self, key: Key) -> list[Key | None]:
        """Return the models of the steps: those in the ensemble's repository, else the only one of that name."""
        ensemble = self._models[key].loaded.polled.config.ensemble_scheduling
        return [self._part(key, step.model_name) for step in (ensemble.step if ensemble is not None else ())]

    def _part(self, key: Key, name: str) -> Key | None:
        if name in self._routes:
            name = self._routes[name].by_weight[0].model
        named = [each for each in self._models if each[1] == name]
        neighbours = [each for each in named if each[0] == key[0]]
        return next(iter(neighbours or (named if len(named) == 1 else ())), None)

    def _cycle_predecessor(self, key: Key) -> str:
        """Return the last ensemble on the cycle through ``key``; empty if it is not on a cycle."""
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


def _linked(loaded: LoadedModel, candidates: Sequence[EnsembleCandidate | None]) -> EnsembleVerdict:
    (config, *_) = loaded.configs.values()
    parts, mistakes = find_step_models(config, candidates)
    if mistakes:
        return _refused(loaded, mistakes)
    policy = ModelTransactionPolicy(decoupled=any(map(is_decoupled, parts)))
    return EnsembleVerdict(
        {version: replace(each, model_transaction_policy=policy) for version, each in loaded.configs.items()}
    )


def _refused(loaded: LoadedModel, mistakes: Sequence[Mistake]) -> EnsembleVerdict:
    return EnsembleVerdict({}, _HAS_MISTAKES, loaded.polled.text.source.place(mistakes))
