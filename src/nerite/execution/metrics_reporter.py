"""The way of the metrics that models count themselves out of their worker."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Final

from nerite.execution import messages
from nerite.execution.outbox import Outbox
from nerite.observability import custom_metrics

OFTEN: Final = 0.02
"""Seconds between two reports, at the least."""
SELDOM: Final = 0.1
"""The same, where there is so much to report that it takes long."""
_PART: Final = 0.02
"""Of its time, what a worker spends on reports; until they are seldom."""


class MetricsReporter:
    """Sends what was counted soon after it has changed, from a thread that is there as soon as there is something.

    A response may leave before that, and then the outbox says that a report is to come.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._changed = threading.Event()
        self._store: Any = None

    def watch(self) -> None:
        """Report what models count, if there is a model that can. Called when one was loaded; any number of times."""
        if self._store is None and (store := custom_metrics.store()) is not None:
            self._store = store
            self._store.on_change = self._begin
            if self._store.collect():
                self._begin()

    def _begin(self) -> None:
        """Have a thread report from now on. Called by whichever thread counts first."""
        self._store.on_change = self._change
        self._change()
        threading.Thread(target=self._report, name="metrics", daemon=True).start()

    def _change(self) -> None:
        self._outbox.changes += 1
        self._changed.set()

    def _report(self) -> None:
        # The server may be gone already; then there is nobody left to tell.
        with contextlib.suppress(OSError):
            while self._changed.wait():
                self._changed.clear()
                began = time.monotonic()
                changes = self._outbox.changes  # before they are collected: more may be in the report than it says
                self._outbox.send(messages.json_frame(messages.METRICS, [changes, self._store.collect()]))
                time.sleep(min(max((time.monotonic() - began) / _PART, OFTEN), SELDOM))
