"""An instance in a worker process: its model, its seat, its jobs and its batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from nerite.backends import registry
from nerite.backends.interface import Instance, InstanceContext, Model, ModelContext
from nerite.core.execution_observer import ExecutionTimes, TraceContext
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.workers.child.io import Inbox, Message
from nerite.workers.ipc import messages
from nerite.workers.ipc.codec import Unpacker

at_seat: Final[ContextVar[int | None]] = ContextVar("at_seat", default=None)
"""Seat of the instance that is being made or finalized."""


class HostedModel:
    """One instance. It runs one job at a time, on whichever thread takes it first."""

    def __init__(
        self, seat: int, do: Callable[[HostedModel, Message], None], requests: Unpacker[RequestHeader]
    ) -> None:
        """``do`` runs a job; ``requests`` unpacks the requests of the instance."""
        self.seat = seat
        self.requests = requests
        self._do = do
        self.name = ""
        self.instance: Instance | None = None
        self._model: Model | None = None
        self._jobs: deque[Message] = deque()
        self._lock = threading.Lock()

    def open(self, context: ModelContext, instance: InstanceContext) -> None:
        """Open the model and make the instance. Raises the backend's exceptions."""
        self.name = instance.name
        with self._seated():
            model = registry.backend_of(context).open(context)
            try:
                self.instance = model.instance(instance)
            except BaseException:
                model.close()
                raise
            self._model = model

    def close(self) -> None:
        """Finalize the instance and close the model."""
        with self._seated():
            if self.instance is not None:
                self.instance.close()
            if self._model is not None:
                self._model.close()
        self.instance = None

    def submit(self, job: Message) -> None:
        """Run a job, or leave it to the thread that runs another one for this instance."""
        if not self._jobs and self._lock.acquire(blocking=False):
            try:
                self._do(self, job)
            finally:
                self._lock.release()
        else:
            self._jobs.append(job)
        del job
        if self._jobs:
            self._run_jobs()

    def try_acquire(self) -> bool:
        """Lock the instance if it is loaded and idle; return whether that succeeded."""
        return self.instance is not None and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Unlock the instance, and run the jobs that have come meanwhile."""
        self._lock.release()
        self._run_jobs()

    def _run_jobs(self) -> None:
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                while self._jobs:
                    self._do(self, self._jobs.popleft())
            finally:
                self._lock.release()

    @contextmanager
    def _seated(self) -> Iterator[None]:
        before = at_seat.set(self.seat)
        try:
            yield
        finally:
            at_seat.reset(before)


# Trace contexts of requests in a worker: the server sends them once a model here needs them.


class WorkerContexts:
    """Trace contexts by batch. Thread-safe."""

    def __init__(self, ask: Callable[[], object]) -> None:
        """``ask`` makes the server send them: for all current batches before it returns, then before each batch.

        Most models never need them, and then they would cost a message per batch.
        """
        self._ask = ask
        self._asked = False
        self._messages: dict[int, tuple[memoryview, int]] = {}
        """CONTEXTS message and its count, by batch."""

    def receive(self, body: memoryview, count: int) -> None:
        """Store a CONTEXTS message."""
        self._messages[messages.read_batch(body)[0]] = body, count

    def may_have(self, batch: int) -> bool:
        """Return False if it is known that no request of a batch is traced."""
        return not self._asked or batch in self._messages

    def of(self, batch: int) -> dict[int, TraceContext]:
        """Return the span of the execution of each traced request, by its index in the batch."""
        if not self._asked:
            self._ask()
            self._asked = True
        message = self._messages.get(batch)
        return {} if message is None else messages.read_contexts(*message)

    def forget(self, batch: int) -> None:
        """Discard the contexts of a batch that has ended."""
        self._messages.pop(batch, None)


# A batch inside a worker, kept until all its requests have had their last response.

_in_order = threading.RLock()
"""Held while control messages about a batch are applied, so that they take effect in order."""


class WorkerRequest(InferenceRequest):
    """A request inside a worker. Its sink is its batch."""

    __slots__ = ()

    streams = True

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Send a response to the server; do nothing after the last one. Raises what goes wrong, to the model."""
        if self.finished:
            return
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        self.sink.respond(self, response, final)

    def is_cancelled(self) -> bool:
        """Return whether the request is cancelled, as far as the server has reported by now."""
        batch = self.sink
        if not self.cancelled and isinstance(batch, WorkerBatch):
            batch.poll()
        return self.cancelled


class WorkerBatch:
    """The requests of one batch, and the responses that they get one by one."""

    __slots__ = (
        "_begun",
        "_control",
        "_done",
        "_inbox",
        "_last_sent",
        "_open",
        "_paused",
        "_send",
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
        """``send`` sends a response to a request of this batch, and sets the end of its times.

        ``done`` is called when the last response has left.
        """
        self.number = number
        self._inbox = inbox
        self._send = send
        self._done = done
        self._begun = False
        self._control: deque[tuple[int, int]] = deque()
        """Control messages that have not taken effect yet."""
        self._paused: set[int] = set()
        self._open: set[int] = set()
        self._last_sent: dict[int, int] = {}
        """When the latest response to each request had left."""
        self.timings: ExecutionTimes
        """Times of the execution; set before it starts."""
        self.requests: list[InferenceRequest] = []
        self.contexts: WorkerContexts | None = None
        """Trace contexts of the requests; None if unknown."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Send a response, as soon as the server accepts it. Thread-safe.

        The first response of an execution is sent in any case: a paused request of an iterative sequence is held
        between its executions, and must not block the other requests of one that was under way when the pause came.
        Responses to a request that the result of ``execute`` has answered are dropped.
        """
        index = self.place(request)
        if index is None:
            return
        timings = ExecutionTimes()
        timings.computed_ns = timings.started_ns
        timings.started_ns = self.timings.started_ns
        timings.inputs_ready_ns = self._last_sent.get(index, self.timings.inputs_ready_ns)
        self.poll()
        if index in self._paused and index in self._last_sent:
            self._inbox.wait(lambda: index not in self._paused or request.cancelled)
        if final:
            request.data = ()
        self._send(self.number, index, response, final, timings)
        self._last_sent[index] = timings.ended_ns
        if final:
            self._open.discard(index)
            if not self._open:
                self._done(self.number)

    def place(self, request: InferenceRequest) -> int | None:
        """Return the index of a request; None if it is no longer kept."""
        return self.requests.index(request) if request in self.requests else None

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return the span of the execution of a request; None if it is not traced."""
        index = self.place(request)
        return None if index is None or self.contexts is None else self.contexts.of(self.number).get(index)

    def poll(self) -> None:
        """Handle the control messages that have arrived."""
        self._inbox.poll()

    def begin(self) -> None:
        """Apply the control messages that have come, and further ones at once: all requests are complete."""
        self._begun = True
        if self._control:
            self._apply_all()

    def receive(self, kind: int, index: int) -> None:
        """Record a control message about a request. Thread-safe.

        A request with ``on_pause`` is paused through that; others block in their next ``respond``.
        """
        # Appended before ``_begun`` is checked, so that one of the two threads applies it.
        self._control.append((kind, index))
        if self._begun:
            self._apply_all()

    def _apply_all(self) -> None:
        with _in_order:
            while self._control:
                self._apply(*self._control.popleft())

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
        """Record the result of the execution; return whether requests are left to answer."""
        for index, (request, response) in enumerate(zip(self.requests, responses, strict=True)):
            if response is not None:
                request.finished = True
                request.data = ()
            elif not request.finished:
                self._open.add(index)
        return bool(self._open)
