"""Which instances have room for a batch. Pure.

An idle instance gets whatever the decider gives. One that takes batches ahead (``Runner.ahead``) gets a second one
while the first runs, and starts it the moment that ends: going to the loop and back for it costs a thread about
0.1 ms, in which it computes nothing. But nobody can overtake, expire or withdraw what was handed over. So only a full
batch goes ahead, which gains nothing by waiting, and only to a model whose batches are so brief that the pause counts
and that waiting behind one more does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from nerite.execution.runner import Runner

BRIEF_NS: Final = 10_000_000
"""An execution that took less is brief. The pause, and what it leaves cold, costs one of 5 ms a tenth of its pace."""


class Places:
    """The instances of one model version. ``idle`` and ``behind`` are for reading: who is to be asked first."""

    __slots__ = ("_brief", "_full", "behind", "idle")

    def __init__(self, runners: Iterable[Runner] = ()) -> None:
        self.idle = deque(runners)
        self.behind: deque[Runner] = deque()
        """Those that run one batch and take another."""
        self._full: set[Runner] = set()
        self._brief = False

    @property
    def ahead(self) -> bool:
        """Whether a full batch may go to an instance that is not idle."""
        return self._brief and bool(self.behind)

    def begin(self) -> Runner:
        """Return the instance, idle until now, that runs the next batch."""
        runner = self.idle.popleft()
        if runner.ahead:
            self.behind.append(runner)
        return runner

    def line_up(self) -> Runner:
        """Return the instance that runs the next batch once it has finished the one it has."""
        runner = self.behind.popleft()
        self._full.add(runner)
        return runner

    def end(self, runner: Runner, took_ns: int) -> None:
        """Note that ``runner`` has finished a batch, and how long that took."""
        self._brief = took_ns < BRIEF_NS
        if not runner.ahead:
            self.idle.append(runner)
        elif runner in self._full:
            self._full.remove(runner)
            self.behind.append(runner)
        else:
            self.behind.remove(runner)
            self.idle.append(runner)

    def gone(self, runner: Runner) -> None:
        """Note that ``runner`` went down. It is idle, or does not count here any more."""
        if runner in self.idle:
            self.idle.remove(runner)

    def remove(self, runner: Runner) -> None:
        """Forget an instance: nobody will say ``end`` for it, whatever it runs."""
        self._full.discard(runner)
        for among in (self.idle, self.behind):
            if runner in among:
                among.remove(runner)

    def came(self, runner: Runner) -> None:
        """Note that ``runner`` is up, and idle."""
        self.idle.append(runner)
