"""Versions that sleep: their processes are up, their weights in the memory of the host, and they take no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from nerite.models.running_version import RunningVersion
from nerite.repository.catalogue import Catalogue, ModelRecord
from nerite.repository.version_state import ModelState, VersionState

_log = logging.getLogger("nerite.repository")

Route = Callable[[ModelRecord, dict[int, RunningVersion]], object]
"""Has a model's requests go to these versions."""
Close = Callable[[ModelRecord, RunningVersion], asyncio.Task[None]]


class SleepingVersions:
    """Has versions sleep and wake. A version that cannot do either is unloaded. For the loop's thread only."""

    def __init__(
        self, catalogue: Catalogue, dependents: Callable[[str], Sequence[ModelRecord]], route: Route, close: Close
    ) -> None:
        """``dependents`` returns the ensembles that need a model."""
        self._catalogue = catalogue
        self._dependents = dependents
        self._route = route
        self._close = close

    def of(self, name: str) -> list[RunningVersion]:
        """Return the versions of a model that sleep."""
        return [version for record in self._catalogue.all_named(name) for version in record.asleep.values()]

    def all(self) -> list[RunningVersion]:
        """Return all versions that sleep."""
        return [version for record in self._catalogue for version in record.asleep.values()]

    async def put_to_sleep(self, name: str, unless: Callable[[], bool]) -> list[asyncio.Task[None]]:
        """Send a model no more requests, and have it sleep; do nothing ``unless``, or if an ensemble needs it.

        Return the tasks that unload it because it could not sleep.
        """
        closing: list[asyncio.Task[None]] = []
        for record in self._catalogue.all_named(name):
            async with record.lock:
                if unless() or not record.running or self._dependents(name):
                    continue
                versions = dict(record.running)
                self._route(record, {})
                for version in versions:
                    record.states[version] = VersionState(ModelState.UNLOADING)
                try:
                    for running in versions.values():
                        await running.sleep(True)
                except Exception as error:
                    _log.warning("'%s' cannot sleep, and is unloaded: %s", name, error)
                    closing += [self._close(record, running) for running in versions.values()]
                    continue
                record.asleep = versions
                record.states.update({version: record.unloaded() for version in versions})
        return closing

    async def wake(self, name: str) -> bool:
        """Have a model take requests again; return False if none of that name sleeps, or it had to be unloaded."""
        woken = False
        closing: list[asyncio.Task[None]] = []
        for record in self._catalogue.all_named(name):
            async with record.lock:
                versions = dict(record.asleep)
                if not versions:
                    continue
                for version in versions:
                    record.states[version] = VersionState(ModelState.LOADING)
                try:
                    for running in versions.values():
                        await running.sleep(False)
                except Exception as error:
                    _log.warning("'%s' does not wake, and is loaded again: %s", name, error)
                    closing += self.drop(record)
                    continue
                record.asleep = {}
                self._route(record, versions)
                woken = True
        if closing:  # their memory is needed
            await asyncio.wait(closing)
        return woken

    async def unload(self, name: str) -> None:
        """Unload a model that sleeps, and wait for its processes to end."""
        for record in self._catalogue.all_named(name):
            async with record.lock:
                closing = self.drop(record)
            if closing:
                await asyncio.wait(closing)

    def drop(self, record: ModelRecord) -> list[asyncio.Task[None]]:
        """Unload the versions of a model that sleep; return the tasks that end their processes."""
        versions, record.asleep = record.asleep, {}
        for version in versions.keys() - record.running.keys():
            record.states[version] = record.unloaded()
        return [self._close(record, running) for running in versions.values()]
