"""The roster of a model whose requests may run on any of its instances: whichever is free takes the next batch.

An idle instance gets whatever the decider gives. One that takes batches ahead (``Runner.ahead``) gets a second one
while the first runs, and starts it the moment that ends: going to the loop and back for it costs a thread about
0.1 ms, in which it computes nothing. But nobody can overtake, expire or withdraw what was handed over. So only a full
batch goes ahead, which gains nothing by waiting, and only to a model whose batches are so brief that the pause counts
and that waiting behind one more does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from nerite.core.errors import Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.roster import Ended, May, Refusal
from nerite.execution.runner import Batch, Runner
from nerite.scheduling.decider import Decider
from nerite.scheduling.release import Release

BRIEF_NS: Final = 10_000_000
"""An execution that took less is brief. The pause, and what it leaves cold, costs one of 5 ms a tenth of its pace."""

_NONE: Final[Batch] = []


class AnyInstance:
    """A decider, and the instances that have room for a batch. Each batch passes through here: written for speed."""

    settles = False
    __slots__ = ("_barred", "_behind", "_brief", "_decider", "_full", "_present", "idle", "offer", "timed")

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.timed = decider.timed
        self.offer = decider.offer
        self.idle: deque[Runner] = deque()
        self._behind: deque[Runner] = deque()
        """Those that run one batch and take another."""
        self._full: set[Runner] = set()
        """Those that run one batch and have another."""
        self._present: set[Runner] = set()
        self._brief = False
        self._barred = False
        """None of those that are idle may begin."""

    @property
    def ahead(self) -> bool:
        """Whether a full batch may go to an instance that is not idle."""
        return self._brief and bool(self._behind)

    @property
    def size(self) -> int:
        """Requests that wait."""
        return self._decider.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""
        return self._decider.waiting

    @property
    def releases(self) -> Mapping[Release, int]:
        """How many batches began for which reason."""
        return self._decider.releases

    def renewed(self) -> AnyInstance:
        """Return an empty one with the same rules, which knows no instances."""
        return AnyInstance(self._decider.renewed())

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return the request as a batch: none needs the others."""
        return [batch[index]]

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return a request of lower priority than ``request``, dropped here; ``request`` itself if there is none."""
        return self._decider.give_way(request) or request

    def choose(self, now: int, may: May | None = None) -> tuple[Runner, Batch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start."""
        decider = self._decider
        if not decider.size or (may is not None and not self._bring_forward(may, now)):
            return None
        if self.idle:
            batch = decider.take(now)
            if batch is None:
                return None
            runner = self.idle.popleft()
            if runner.ahead:
                self._behind.append(runner)
            return runner, batch
        if self._brief and self._behind and (batch := decider.take_full(now)) is not None:
            runner = self._behind.popleft()
            self._full.add(runner)
            return runner, batch
        return None

    def ended(self, runner: Runner, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int) -> Ended:
        """Note that ``runner`` has finished a batch, whose requests all come to their end with it."""
        if runner in self._present:
            self._brief = took_ns < BRIEF_NS
            if not runner.ahead:
                self.idle.append(runner)
            elif runner in self._full:
                self._full.remove(runner)
                self._behind.append(runner)
            else:
                self._behind.remove(runner)
                self.idle.append(runner)
        return batch, responses, _NONE

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        """Return ``response``: all of it is the caller's."""
        return response

    def resume(self, request: InferenceRequest) -> None:
        """Do nothing: what runs, runs."""

    def server_stops(self) -> None:
        """Do nothing: no request waits for another one."""

    def finish(self) -> None:
        """Do nothing: no request waits for another one."""

    def came(self, runner: Runner) -> None:
        """Note that ``runner`` is there, up and idle."""
        self._present.add(runner)
        self.idle.append(runner)

    def gone(self, runner: Runner) -> Sequence[Refusal]:
        """Note that ``runner`` went down or left. Others can do what it would have done."""
        self.retire(runner)
        return ()

    def retire(self, runner: Runner) -> None:
        """Give no more batches to ``runner``, whatever it runs."""
        self._present.discard(runner)
        self._full.discard(runner)
        for among in (self.idle, self._behind):
            if runner in among:
                among.remove(runner)

    def holds(self, runner: Runner) -> bool:
        """Return False: whoever leaves need only finish what it runs."""
        return False

    def wake_at(self) -> int | None:
        """Return when the gathered batch has waited enough, or the next request expires."""
        return self._decider.wake_at(bool(self.idle) and not self._barred)

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that waited too long."""
        return [(request, Unavailable("Request timeout expired")) for request in self._decider.expire(now)]

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Drop ``request``, if it waits."""
        return (request,) if self._decider.withdraw(request) else ()

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits."""
        return self._decider.drain()

    def _bring_forward(self, may: May, now: int) -> bool:
        """Have the batch that is due, if one is, go to an idle instance that may begin; return whether there is one."""
        due = self._decider.due(now)
        runner = next(filter(may, self.idle), None) if due else None
        self._barred = due and runner is None
        if runner is not None:
            self.idle.remove(runner)
            self.idle.appendleft(runner)
        return runner is not None
