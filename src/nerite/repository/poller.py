"""Control mode ``poll``: look at the repositories again and again, and load and unload what changed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from nerite.repository.manager import ModelManager
from nerite.repository.watch import SETTLE_NS, Model, Watch

_log = logging.getLogger("nerite.repository")
_SETTLE_SECONDS: Final = SETTLE_NS / 1e9 + 0.01
"""A little more, as timers may be early."""


class Poller:
    """One for a server in this mode."""

    def __init__(self, manager: ModelManager, seconds: float) -> None:
        """``seconds`` go by between two looks at repositories in which nothing moves."""
        self._manager = manager
        self._seconds = seconds
        self._watch = Watch()

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
