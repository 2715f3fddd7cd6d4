"""Whether an instance's executions are so brief that the loop runs them itself. Pure.

Handing a batch to a thread and taking the answer back costs two wake-ups and a fight for the GIL, about 0.1 ms on two
cores. For a model that computes for 20 us, a small network or a tree, that is five times the work. Nobody knows before
how long a model takes, so it begins in its thread; after a run of executions that may be brief the loop takes over.
Processor time tells that of each of them. That alone would be wrong for frameworks that compute in threads of their own
while ours waits, as OpenVINO does with several streams, so the shortest of the run has to be brief by the clock, too.

On the loop no wait for the GIL is in the time, and no cold cache. Executions that are not brief add up to a debt that
brief ones pay back; a single one never counts for more than a quarter, as any may be held up by what else the machine
does. Where the debt is full the model returns to its thread, for twice as long as the last time. So a model that is
brief only now and then stays in its thread, and holds up the loop a few times in its life.
"""

from __future__ import annotations

from typing import Final

BRIEF_NS: Final = 70_000
"""An execution of less is better run on the loop."""
MOST_NS: Final = 4 * BRIEF_NS
"""An execution of more counts for so much."""
DEBT_NS: Final = 4 * (MOST_NS - BRIEF_NS)
"""Where the debt is full: what the executions on the loop may take together beyond ``BRIEF_NS`` each."""
_COLD: Final = 2
"""In a thread, woken for it, the same computation takes up to so many times longer."""
_WAIT_NS: Final = 5_000_000
_FIRST: Final = 8
_LONGEST: Final = 1 << 20


class Brevity:
    """The history of one instance. ``on_loop`` says where its next execution belongs."""

    __slots__ = ("_debt", "_needed", "_run", "_shortest_ns", "on_loop")

    def __init__(self) -> None:
        self.on_loop = False
        self._needed = _FIRST
        self._run = 0
        self._shortest_ns = _WAIT_NS
        self._debt = 0

    def ran_in_thread(self, computed_ns: int, took_ns: int) -> None:
        """Note an execution that used ``computed_ns`` of its thread's processor time, and ``took_ns`` in all.

        Much of the latter may be waiting for the GIL, but hardly in all of a run.
        """
        if computed_ns < BRIEF_NS * _COLD and took_ns < _WAIT_NS:
            self._run += 1
            self._shortest_ns = min(self._shortest_ns, took_ns)
        else:
            self._run = 0
            self._shortest_ns = _WAIT_NS
        self.on_loop = self._run >= self._needed and self._shortest_ns < BRIEF_NS * _COLD

    def ran_on_loop(self, took_ns: int) -> None:
        """Note an execution during which everything else waited."""
        self._debt = max(0, self._debt + min(took_ns, MOST_NS) - BRIEF_NS)
        if self._debt >= DEBT_NS:
            self._debt = self._run = 0
            self._shortest_ns = _WAIT_NS
            self.on_loop = False
            self._needed = min(self._needed * 2, _LONGEST)
