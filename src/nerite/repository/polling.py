"""Control mode ``poll``: look at the repositories again and again, and load and unload what changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.repository.catalogue import ModelFingerprint
from nerite.repository.manager import ModelManager

# What changed in the repositories from one look to the next, once it has come to rest. Pure.
#
# Files are copied into a repository while the server looks: a change counts when every look has seen the same for
# ``SETTLE_NS``, whatever the times of the files and of the day. A model that vanishes, which some ways to replace one
# do for a moment, is gone when two looks have missed it.

SETTLE_NS: Final = 1_000_000_000

Model: TypeAlias = tuple[str, str]
"""Namespace and name."""


class RepositoryChanges(NamedTuple):
    """What is to be done after a look."""

    changed: list[Model]
    """To be loaded."""
    gone: list[Model]
    """To be unloaded."""


class RepositoryWatch:
    """Remembers what was seen and has not come to rest."""

    def __init__(self) -> None:
        self._restless: dict[Model, tuple[ModelFingerprint, int]] = {}
        """How they look, and since when."""
        self._missing: set[Model] = set()

    @property
    def restless(self) -> bool:
        """Whether to look again soon."""
        return bool(self._restless or self._missing)

    def look(
        self,
        found: Mapping[Model, ModelFingerprint],
        known: Mapping[Model, ModelFingerprint | None],
        running: Collection[Model],
        now_ns: int,
    ) -> RepositoryChanges:
        """Compare what was ``found`` with what is ``known``: how the files of a model looked when it was last loaded.

        ``now_ns`` is of a clock that does not jump.
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
"""A little more, as timers may be early."""


class Poller:
    """One for a server in this mode."""

    def __init__(self, manager: ModelManager, seconds: float) -> None:
        """``seconds`` go by between two looks at repositories in which nothing moves."""
        self._manager = manager
        self._seconds = seconds
        self._watch = RepositoryWatch()

    async def run(self) -> None:
        """Look, and do what follows, until cancelled."""
        while True:
            await asyncio.sleep(min(_SETTLE_SECONDS, self._seconds) if self._watch.restless else self._seconds)
            await self._look()

    async def _look(self) -> None:
        manager = self._manager
        found = await manager.look()
        records = {(record.namespace, record.name): record for record in manager.records}
        known = {model: record.seen for model, record in records.items()}
        running: list[Model] = [model for model, record in records.items() if record.running]
        findings = self._watch.look(found, known, running, time.monotonic_ns())
        for name, error in await manager.load_all(name for _, name in findings.changed):
            _log.error("failed to reload '%s': %s", name, error.message)
        for model in findings.gone:
            await manager.unload_one(records[model])
