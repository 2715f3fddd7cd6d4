"""An instance in a worker process: the model it is of, its seat, and the jobs that are for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from nerite.backends import registry
from nerite.backends.interface import Instance, InstanceContext, Model, ModelContext
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.workers.child.io import Inbox, Message
from nerite.workers.ipc import messages
from nerite.workers.ipc.codec import Unpacker

at_seat: Final[ContextVar[int | None]] = ContextVar("at_seat", default=None)
"""The seat of the instance that is being made or finalized."""


class HostedModel:
    """One instance. It has one job at a time, on whichever thread comes first."""

    def __init__(
        self, seat: int, do: Callable[[HostedModel, Message], None], requests: Unpacker[RequestHeader]
    ) -> None:
        """``do`` does one of the jobs; ``requests`` unpacks those of the instance."""
        self.seat = seat
        self.requests = requests
        self._do = do
        self.name = ""
        self.instance: Instance | None = None
        self._model: Model | None = None
        self._jobs: deque[Message] = deque()
        self._at_work = threading.Lock()

    def open(self, context: ModelContext, instance: InstanceContext) -> None:
        """Open the model and make the instance. Raises what the backend raises."""
        self.name = instance.name
        with self._seated():
            self._model = registry.backend_of(context).open(context)
            self.instance = self._model.instance(instance)

    def close(self) -> None:
        """Finalize the instance and close the model."""
        with self._seated():
            if self.instance is not None:
                self.instance.close()
            if self._model is not None:
                self._model.close()
        self.instance = None

    def attend(self, job: Message) -> None:
        """Do a job; or leave it to the thread that is at another one for this instance."""
        if not self._jobs and self._at_work.acquire(blocking=False):
            try:
                self._do(self, job)
            finally:
                self._at_work.release()
        else:
            self._jobs.append(job)
        del job
        if self._jobs:
            self._work()

    def enlist(self) -> bool:
        """Take the instance for a while, if it is there and nobody else has it; return whether that is so."""
        return self.instance is not None and self._at_work.acquire(blocking=False)

    def release(self) -> None:
        """Give the instance back, and do what has come for it meanwhile."""
        self._at_work.release()
        self._work()

    def _work(self) -> None:
        while self._jobs and self._at_work.acquire(blocking=False):
            try:
                while self._jobs:
                    self._do(self, self._jobs.popleft())
            finally:
                self._at_work.release()

    @contextmanager
    def _seated(self) -> Iterator[None]:
        before = at_seat.set(self.seat)
        try:
            yield
        finally:
            at_seat.reset(before)


# Where requests stand in their traces, as a worker knows it: the server says so once somebody here wants to know.


class WorkerContexts:
    """What the server said, by batch. For any thread."""

    def __init__(self, ask: Callable[[], object]) -> None:
        """``ask`` has the server say it: of the batches that are here before it returns, then of each before it comes.

        Most models never want to know, and then it would cost a message for each batch.
        """
        self._ask = ask
        self._asked = False
        self._told: dict[int, tuple[memoryview, int]] = {}
        """The message, and its count."""

    def hear(self, body: memoryview, count: int) -> None:
        """Take a CONTEXTS message."""
        self._told[messages.read_batch(body)[0]] = body, count

    def may_tell(self, batch: int) -> bool:
        """Return False if it is known that nothing is traced in a batch."""
        return not self._asked or batch in self._told

    def of(self, batch: int) -> dict[int, TraceContext]:
        """Return the span of the execution of each request that is traced, by its place in the batch."""
        if not self._asked:
            self._ask()
            self._asked = True
        told = self._told.get(batch)
        return {} if told is None else messages.read_contexts(*told)

    def forget(self, batch: int) -> None:
        """Take note that a batch is over."""
        self._told.pop(batch, None)


# A batch inside a worker, for as long as one of its requests may get a response.

_in_order = threading.RLock()
"""Held by the thread that applies what was said of a batch: what was said first takes effect first."""


class WorkerRequest(InferenceRequest):
    """A request inside a worker. Its sink is its batch."""

    __slots__ = ()

    streams = True

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Send one answer to the server; ignored once a final answer has left. Raises what goes wrong, to the model."""
        if self.finished:
            return
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        self.sink.respond(self, response, final)

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more, as far as the server has said by now."""
        batch = self.sink
        if not self.cancelled and isinstance(batch, WorkerBatch):
            batch.look()
        return self.cancelled


class WorkerBatch:
    """The requests of one batch, and the way of their responses where those leave one by one."""

    __slots__ = (
        "_begun",
        "_done",
        "_heard",
        "_inbox",
        "_open",
        "_paused",
        "_send",
        "_since",
        "contexts",
        "number",
        "requests",
        "timings",
    )

    def __init__(
        self,
        number: int,
        inbox: Inbox,
        send: Callable[[int, int, InferenceResponse, bool, ExecutionTimes], None],
        done: Callable[[int], None],
    ) -> None:
        """``send`` sends a response to a request of this batch, and notes in its marks when that was.

        ``done`` is called when the last one has left.
        """
        self.number = number
        self._inbox = inbox
        self._send = send
        self._done = done
        self._begun = False
        self._heard: deque[tuple[int, int]] = deque()
        """What the server has said of requests, until it takes effect."""
        self._paused: set[int] = set()
        self._open: set[int] = set()
        self._since: dict[int, int] = {}
        """By request, when its last response had left."""
        self.timings: ExecutionTimes
        """The times of the execution; set before it begins."""
        self.requests: list[InferenceRequest] = []
        self.contexts: WorkerContexts | None = None
        """Where the requests stand in their traces; None where nobody knows."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Send a response, as soon as the server wants it. On any thread.

        What comes for a request that ``execute`` has answered, too, is dropped.
        """
        index = self.place(request)
        if index is None:
            return
        timings = ExecutionTimes()
        timings.computed_ns = timings.started_ns
        timings.started_ns = self.timings.started_ns
        timings.inputs_ready_ns = self._since.get(index, self.timings.inputs_ready_ns)
        self.look()
        if index in self._paused:
            self._inbox.wait(lambda: index not in self._paused or request.cancelled)
        if final:
            request.data = ()
        self._send(self.number, index, response, final, timings)
        self._since[index] = timings.ended_ns
        if final:
            self._open.discard(index)
            if not self._open:
                self._done(self.number)

    def place(self, request: InferenceRequest) -> int | None:
        """Return which of the requests one is, None if they are not kept any more."""
        return self.requests.index(request) if request in self.requests else None

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return the span of the execution of a request, None if it is not traced."""
        index = self.place(request)
        return None if index is None or self.contexts is None else self.contexts.of(self.number).get(index)

    def look(self) -> None:
        """Take note of what the server has said."""
        self._inbox.look()

    def begin(self) -> None:
        """Let what the server says of the requests take effect from now on, and what it has said: all are there."""
        self._begun = True
        if self._heard:
            self._take_effect()

    def hear(self, kind: int, index: int) -> None:
        """Take note of what the server says of a request. On any thread.

        Whoever holds the request and pauses by itself is told; others wait when they next respond.
        """
        # Noted before it is looked at whether the batch has begun, so that one of both threads finds it.
        self._heard.append((kind, index))
        if self._begun:
            self._take_effect()

    def _take_effect(self) -> None:
        with _in_order:
            while self._heard:
                self._apply(*self._heard.popleft())

    def _apply(self, kind: int, index: int) -> None:
        request = self.requests[index] if index < len(self.requests) else None
        if kind == messages.CANCEL:
            if request is not None:
                request.cancel()
        elif request is not None and request.on_pause is not None:
            request.pause(kind == messages.PAUSE)
        elif kind == messages.PAUSE:
            self._paused.add(index)
        else:
            self._paused.discard(index)

    def keep(self, responses: Sequence[InferenceResponse | None]) -> bool:
        """Take note that the batch has run, and of what it returned; return whether a request is left to answer."""
        for index, (request, response) in enumerate(zip(self.requests, responses, strict=True)):
            if response is not None:
                request.finished = True
                request.data = ()
            elif not request.finished:
                self._open.add(index)
        return bool(self._open)
