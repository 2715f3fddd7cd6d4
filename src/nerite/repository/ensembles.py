"""Keeps ensembles in line with the models that they are put together from, which come, change and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from nerite.config.mistake import Mistake
from nerite.execution.running_version import RunningVersion
from nerite.repository import refusals
from nerite.repository.assembly import Assembly, Target, find_targets
from nerite.repository.catalogue import Catalogue
from nerite.repository.maker import VersionMaker
from nerite.repository.model_record import ModelRecord
from nerite.scheduling.ensemble.graph import Part

_log = logging.getLogger("nerite.repository")


class Ensembles:
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

    def put_together(self, record: ModelRecord, assembly: Assembly, mistakes: Sequence[Mistake]) -> None:
        """Have an ensemble run as its files say, which have these ``mistakes``. Raises ``NeriteError``.

        What ran goes on then; if nothing did, the ensemble runs once its models are as it needs them.
        """
        targets: list[Target] = []
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

    def _targets(self, record: ModelRecord, assembly: Assembly) -> tuple[list[Target], list[Mistake]]:
        """Return what the steps of an ensemble go to, which tells it how it runs from now on, and what is wrong."""
        targets, mistakes = find_targets(assembly, record.namespace, self._catalogue)
        for _, running in targets if not mistakes else ():
            running.tell_witnesses()
        return targets, mistakes

    def _made(self, record: ModelRecord, assembly: Assembly, targets: Sequence[Target]) -> dict[int, RunningVersion]:
        config, signature = assembly.finished(targets)
        parts = [Part(running.signature, running.decoupled, running.worker) for _, running in targets]
        record.assembly, record.parts = assembly, _essence(targets)
        return {
            version: self._maker.assemble(record.name, version, config, signature, parts)
            for version in assembly.versions
        }


def _essence(targets: Sequence[Target]) -> tuple[object, ...]:
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
