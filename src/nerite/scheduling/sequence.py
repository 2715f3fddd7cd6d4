"""A sequence: requests that belong together, in their order, and what one leaves for the next."""

from __future__ import annotations

from collections import deque
from typing import Any

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse


class Sequence:
    """One sequence, from its first request until its last was answered. Changed by ``SequenceBatcher`` only."""

    __slots__ = (
        "closed",
        "follower",
        "follows",
        "id",
        "ready",
        "running",
        "slot",
        "slots",
        "state",
        "touched_ns",
        "waiting",
    )

    def __init__(self, id: int | str) -> None:
        self.id = id
        self.state: Any = None
        """What the last request left for the next; belongs to ``execution/sequence_dress.py``."""
        self.waiting: deque[SequenceRequest] = deque()
        self.running = False
        """A request of it runs. Two never do."""
        self.ready = False
        """The first request that waits may run: ``slots`` know of it."""
        self.closed = False
        """No request joins it any more."""
        self.follower: Sequence | None = None
        """The next sequence with the same id, which may not begin before this one is over."""
        self.follows = False
        """It waits for the one before."""
        self.slots: Any = None
        """The ``Slots`` of the instance that has it; None while it waits for one."""
        self.slot = 0
        """Which of them."""
        self.touched_ns = 0
        """When a request of it last came to its end."""

    def drop(self) -> list[SequenceRequest]:
        """Let go of the requests that wait, and return them."""
        dropped = [*self.waiting]
        self.waiting.clear()
        for request in dropped:
            request.queue = None
        return dropped

    def drop_before_start(self) -> list[SequenceRequest]:
        """Let go of the waiting requests that need what ran before them, and return them."""
        dropped = []
        while self.waiting and not self.waiting[0].starts:
            request = self.waiting.popleft()
            request.queue = None
            dropped.append(request)
        return dropped


class SequenceRequest(InferenceRequest):
    """A request of a sequence, as schedulers and models see it. Its answers are the answers to the caller's.

    It may get another header and other data than the caller wrote, and may run several times.
    """

    __slots__ = ("begun", "ends", "outer", "paused", "sequence", "sequence_id", "starts")

    sequence: Sequence

    def __init__(self, outer: InferenceRequest) -> None:
        super().__init__(outer.header, outer.data, outer.sink, outer.arrived_ns, outer.id)
        self.outer = outer
        """The caller's."""
        self.sequence_id = outer.header.sequence_id
        """The caller's, or one that he was given."""
        self.paused = False
        """The caller wants no more responses for now."""
        self.begun = False
        """It has run, and waits to run once more."""
        self.starts = outer.header.sequence_start
        """It is the first of its sequence."""
        self.ends = outer.header.sequence_end
        """It is the last."""
        outer.on_cancel = self._outer_cancelled
        outer.on_pause = self._outer_paused

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Answer the caller."""
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        self.outer.respond(response, final)

    @property
    def caused(self) -> bool:  # type: ignore[override]  # what the caller's says
        """Whether somebody inside the server waits for the answer."""
        return self.outer.caused

    @property
    def origin(self) -> InferenceRequest:
        """The caller's."""
        return self.outer

    def undress(self) -> None:
        """Have the caller's header and data."""
        self.header, self.data = self.outer.header, self.outer.data

    @property
    def held(self) -> bool:
        """Whether it is not to run again for now: it has had responses, and the caller wants no more yet."""
        return self.paused and self.on_pause is not None

    def _outer_cancelled(self, _outer: InferenceRequest) -> None:
        self.cancel()

    def _outer_paused(self, _outer: InferenceRequest, paused: bool) -> None:
        self.paused = paused
        self.pause(paused)
