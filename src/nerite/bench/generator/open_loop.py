"""An open loop: requests are sent when they are due, whatever has become of those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter

from nerite.bench.generator.alarm import Alarm
from nerite.bench.generator.recorder import Recorder
from nerite.bench.generator.slot import Slot


class OpenLoop:
    """Sends by a schedule. A request for which no slot is free waits for one, and its latency counts from its time."""

    def __init__(
        self, recorder: Recorder, arrivals: Iterator[float], began: float, another: Callable[[], Slot | None]
    ) -> None:
        self.recorder = recorder
        self._arrivals = arrivals
        self._began = began
        self._another = another
        """Makes one more slot, or returns None where there are enough."""
        self._next = began + next(arrivals)
        self._idle: list[Slot] = []
        self._waiting: deque[tuple[float, float]] = deque()
        """When each was due, and when it would have been sent if there had been a slot."""
        self._alarm = Alarm(self._ring)
        self._running = True

    def begin(self, slots: list[Slot]) -> None:
        """Follow the schedule from now on."""
        self._idle.extend(slots)
        self._alarm.set(self._next)

    def answered(self, slot: Slot) -> None:
        """Note the answer; the slot is free."""
        self.recorder.answered(slot.due, slot.sent, perf_counter())
        self._free(slot)

    def failed(self, slot: Slot, reason: str) -> None:
        """Note the failure; the slot is free."""
        self.recorder.refused(reason)
        self._free(slot)

    def end(self) -> None:
        """Send nothing more of the load."""
        self._running = False
        self._waiting.clear()
        self._alarm.close()
        idle, self._idle = self._idle, []
        for slot in idle:
            slot.rest()

    def _ring(self) -> None:
        now = perf_counter()
        while self._next <= now:
            self._send(self._next)
            self._next = self._began + next(self._arrivals)
        self._alarm.set(self._next)

    def _send(self, due: float) -> None:
        slot = self._idle.pop() if self._idle else self._another()
        if slot is None:
            self._waiting.append((due, perf_counter()))
            return
        slot.due = due
        slot.sent = perf_counter()
        slot.ask()

    def _free(self, slot: Slot) -> None:
        if not self._running:
            slot.rest()
            return
        slot.sent = 0.0
        if self._waiting:
            slot.due, slot.sent = self._waiting.popleft()
            slot.ask()
        else:
            self._idle.append(slot)
