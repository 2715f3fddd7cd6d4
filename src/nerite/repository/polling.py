"""Control mode ``poll``: scans the repositories periodically, and loads and unloads models that changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.repository.catalogue import ModelFingerprint
from nerite.repository.manager import ModelManager

SETTLE_NS: Final = 1_000_000_000
"""How long a change must be stable before it counts."""

Model: TypeAlias = tuple[str, str]
"""Namespace and name of a model."""


class RepositoryChanges(NamedTuple):
    """Models to load and to unload after a scan."""

    changed: list[Model]
    """Models to load."""
    gone: list[Model]
    """Models to unload."""


class RepositoryWatch:
    """Debounces changes of the repositories between scans. Pure: it is given the time.

    Files may be copied into a repository during a scan, so a change counts only after every scan has seen the same
    fingerprint for ``SETTLE_NS``, regardless of file times and the wall clock. A model counts as gone when two scans
    in a row have missed it, because some ways of replacing a model remove it for a moment.
    """

    def __init__(self) -> None:
        self._restless: dict[Model, tuple[ModelFingerprint, int]] = {}
        """Changed models with their fingerprint and the time it was first seen."""
        self._missing: set[Model] = set()

    @property
    def restless(self) -> bool:
        """True if the next scan should come soon, because a change is not yet stable."""
        return bool(self._restless or self._missing)

    def compare(
        self,
        found: Mapping[Model, ModelFingerprint],
        known: Mapping[Model, ModelFingerprint | None],
        running: Collection[Model],
        now_ns: int,
    ) -> RepositoryChanges:
        """Compare the fingerprints ``found`` by a scan with those ``known`` from the last load of each model.

        ``now_ns`` comes from a monotonic clock.
        """
        changed = []
        restless: dict[Model, tuple[ModelFingerprint, int]] = {}
        for model, seen in found.items():
            if known.get(model) == seen:
                continue
            before, since_ns = self._restless.get(model, (None, now_ns))
            if before != seen:
                since_ns = now_ns
            if now_ns - since_ns < SETTLE_NS:
                restless[model] = seen, since_ns
            else:
                changed.append(model)
        missing = {model for model in running if model not in found}
        gone = sorted(missing & self._missing)
        self._restless, self._missing = restless, missing.difference(gone)
        return RepositoryChanges(changed, gone)


_log = logging.getLogger("nerite.repository")
_SETTLE_SECONDS: Final = SETTLE_NS / 1e9 + 0.01
"""Slightly longer than ``SETTLE_NS``, because timers may fire early."""


class Poller:
    """Scans the repositories periodically and applies what changed."""

    def __init__(self, manager: ModelManager, seconds: float) -> None:
        """``seconds`` is the interval between scans while nothing changes."""
        self._loading = False
        """Models are being loaded, which may take as long as they need."""
        waiting = lambda: 0 if self._loading else 1  # noqa: E731
        self.loop = WorkLoop("polling", waiting=waiting, stall_seconds=STALL_SECONDS + 3 * seconds)
        self._manager = manager
        self._seconds = seconds
        self._watch = RepositoryWatch()

    async def run(self) -> None:
        """Scan and apply changes until cancelled."""
        while True:
            await asyncio.sleep(min(_SETTLE_SECONDS, self._seconds) if self._watch.restless else self._seconds)
            with self.loop.step("scan"):
                await self._poll()

    async def _poll(self) -> None:
        manager = self._manager
        found = await manager.poll()
        records = {(record.namespace, record.name): record for record in manager.records}
        known = {model: record.seen for model, record in records.items()}
        running: list[Model] = [model for model, record in records.items() if record.running or record.routed]
        findings = self._watch.compare(found, known, running, time.monotonic_ns())
        self._loading = True
        try:
            for name, error in await manager.load_all(name for _, name in findings.changed):
                _log.error("failed to reload '%s': %s", name, error.message)
        finally:
            self._loading = False
        for model in findings.gone:
            with self.loop.step(f"the end of '{model[1]}'"):
                await manager.unload_one(records[model])
