"""A closed loop: so many requests under way at any time, each followed by the next."""

from __future__ import annotations

from time import perf_counter

from nerite.bench.generator.recorder import Recorder
from nerite.bench.generator.slot import Slot


class ClosedLoop:
    """Keeps its slots busy from ``begin`` on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._running = True

    def begin(self, slots: list[Slot]) -> None:
        """Have each slot ask."""
        for slot in slots:
            slot.due = slot.sent = perf_counter()
            slot.ask()

    def answered(self, slot: Slot) -> None:
        """Note the answer, and ask again."""
        now = perf_counter()
        self.recorder.answered(slot.due, slot.sent, now)
        if self._running:
            slot.due = slot.sent = now
            slot.ask()
        else:
            slot.rest()

    def failed(self, slot: Slot, reason: str) -> None:
        """Note the failure, and ask again."""
        self.recorder.refused(reason)
        if self._running:
            slot.due = slot.sent = perf_counter()
            slot.ask()
        else:
            slot.rest()

    def end(self) -> None:
        """Ask nothing more."""
        self._running = False
