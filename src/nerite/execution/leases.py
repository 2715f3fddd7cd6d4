"""Which instance has which batch. Each batch that was handed to an instance comes back exactly once.

A batch that an instance cannot take as a whole, because one of its requests cannot be sent, is handed over again
request by request: then the request at fault fails alone, and the others run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence

from nerite.core.marks import Marks
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.runner import Batch, Runner


class Split:
    """A batch that runs request by request: what is left to run, and the answers so far."""

    __slots__ = ("_left", "awaited", "batch", "looping", "marks", "responses")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.marks: Marks | None = None
        """The times of the request that ran last."""
        self.responses: list[InferenceResponse | None] = [None] * len(batch)
        # A request that only fills a slot has no caller, and no answer.
        self._left = [index for index, request in enumerate(batch) if request.sink is not NOBODY]
        self._left.reverse()
        self.awaited: int | None = None
        """The place in the batch of the request that runs now."""
        self.looping = False
        """The next request is handed over by a loop that is under way."""

    def next(self) -> int | None:
        """Return the place of the request that is to run now; None after the last."""
        self.awaited = self._left.pop() if self._left else None
        return self.awaited

    def answered(self, alone: Batch, responses: Sequence[InferenceResponse | None], marks: Marks | None) -> None:
        """Take the answer to the request that ran in ``alone``."""
        assert self.awaited is not None
        self.responses[self.awaited] = responses[alone.index(self.batch[self.awaited])]
        self.marks = marks or self.marks
        self.awaited = None


class Leases(dict[int, tuple[Runner, Batch]]):
    """The batches of one model version that instances have, each with its instance. For the loop's thread only.

    By the identity of the batch, which is the same list when it comes back.
    """

    __slots__ = ()

    def holds(self, runner: Runner) -> bool:
        """Return whether ``runner`` has a batch."""
        return any(holder is runner for holder, _ in self.values())

    def batches(self) -> Iterator[Batch]:
        """Yield each batch that is out."""
        return (batch for _, batch in self.values())

    def lost(self) -> Sequence[tuple[Runner, Batch]]:
        """Return the batches whose instance says that it has nothing under way."""
        return [(runner, batch) for runner, batch in self.values() if not runner.busy]


def unanswered(holder: Callable[[InferenceRequest], None], since: int) -> list[InferenceRequest]:
    """Return the requests that ``holder`` is to be told of when they are cancelled, and that wait in no queue.

    What has waited since before ``since`` waits in a queue that is no more. They are searched among all objects of the
    process, so that nothing has to be kept for each request as long as none is lost.
    """
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), InferenceRequest)  # ``isinstance`` may run code of the object's class
        and not each.finished
        and each.on_cancel is holder
        and (each.queue is None or each.queued_ns < since)
    ]
