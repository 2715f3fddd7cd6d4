"""Calls that a model makes to other models, seen from its worker.

A call has a number. Its responses are read by whichever thread reads the channel at the moment (``io.py``), and are
queued in the call until its caller takes them: a blocked thread, or a coroutine, whose event loop is notified and reads
the channel itself meanwhile.
"""

from __future__ import annotations

import base64
import itertools
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nerite.core.errors import Cancelled, NeriteError, Unavailable, Unsupported
from nerite.core.request import InferenceRequest, RequestHeader, at_hand
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import TensorData
from nerite.workers.child.hosted_model import WorkerBatch, at_seat
from nerite.workers.child.io import Inbox, Outbox
from nerite.workers.ipc import messages

WINDOW: Final = 16
"""Maximum number of unread responses to a call; then the called model is paused."""
TAKEN_EVERY: Final = WINDOW // 2
"""Number of responses after which the server is notified that they were read."""


class OutgoingCall:
    """One call. For a single caller; responses may come from any thread."""

    __slots__ = ("_answers", "_calls", "_taken", "_wakers", "_windowed", "final", "number")

    def __init__(self, calls: BlsClient, number: int, *, windowed: bool) -> None:
        self.number = number
        self.final = False
        """The last response was taken."""
        self._calls = calls
        self._answers: deque[tuple[InferenceResponse, bool]] = deque()
        self._wakers: list[Callable[[], object]] = []
        self._windowed = windowed
        self._taken = 0

    def next(self) -> tuple[InferenceResponse, bool]:
        """Wait for the next response; return it, and whether it is the last. Raises as ``Inbox.check_process``."""
        self._calls.inbox.check_process()
        answers = self._answers
        if not answers:
            self._calls.inbox.wait(lambda: bool(answers))
        answer = answers.popleft()
        self.final = answer[1]
        if self._windowed and not self.final:
            self._taken += 1
            if self._taken == TAKEN_EVERY:
                self._taken = 0
                self._calls.outbox.send(messages.request_frame(messages.TAKEN, self.number, TAKEN_EVERY))
        return answer

    def when_next(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        """Call ``call`` on ``loop``, from which this is called, once ``next`` does not block."""
        inbox = self._calls.inbox
        inbox.attend(loop)

        def here() -> None:
            inbox.leave(loop)
            call()

        self._wakers.append(lambda: loop.call_soon_threadsafe(here))
        if self._answers:
            self._wake()

    def cancel(self) -> None:
        """Cancel the request. The called model decides how it ends: responses still come until the last."""
        self._calls.inbox.check_process()
        self._calls.outbox.send(messages.request_frame(messages.CANCEL_CALL, self.number, 0))

    def give_up(self) -> None:
        """Cancel the request and take no more responses: the last one is generated here."""
        self._calls.give_up(self)

    def receive(self, response: InferenceResponse, final: bool) -> None:
        """Queue a response from the server. Thread-safe."""
        self._answers.append((response, final))
        self._wake()

    def _wake(self) -> None:
        # Two threads may get here at once: each takes one waker.
        if self._wakers:
            self._wakers.pop()()


class BlsClient:
    """The unfinished calls of a worker, and the control calls of its models."""

    def __init__(self, inbox: Inbox, outbox: Outbox, batches: Mapping[int, WorkerBatch]) -> None:
        """``batches`` are those that run or have requests without their last response."""
        self.inbox = inbox
        self.outbox = outbox
        self.allowed: set[int] = set()
        """Seats of the models that may call others: initialized, and not being finalized."""
        self._batches = batches
        self._numbers = itertools.count(1)
        self._open: dict[int, OutgoingCall] = {}
        self._questions: dict[int, list[dict[str, Any]]] = {}
        inbox.on_end = self._server_gone

    def call(
        self,
        header: RequestHeader,
        data: Sequence[TensorData],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> OutgoingCall:
        """Send a request to another model, on behalf of ``parent`` or else of the requests being executed.

        Raises ``Unsupported`` before the model is initialized, while it is finalized, and in a forked process.
        """
        self.inbox.check_process()
        if self._seat() not in self.allowed:
            raise Unsupported("BLS is only supported during the 'execute' function.")
        number = next(self._numbers) & 0xFFFFFFFF
        call = self._open[number] = OutgoingCall(self, number, windowed=decoupled)
        try:
            self.outbox.call(number, messages.caller(*self._on_behalf(parent), decoupled), header, name, data)
        except BaseException:
            self._open.pop(number, None)
            raise
        return call

    def ask(self, what: str, **about: Any) -> Any:
        """Send an ASK message and wait for the reply. Raises ``NeriteError``."""
        self.inbox.check_process()
        number = next(self._numbers) & 0xFFFFFFFF
        answers: list[dict[str, Any]] = []
        self._questions[number] = answers
        self.outbox.send(
            messages.json_frame(messages.ASK, {"number": number, "seat": self._seat(), "what": what, **about})
        )
        self.inbox.wait(lambda: bool(answers))
        if not answers:
            raise _gone()
        (answer,) = answers
        if "error" in answer:
            raise messages.error_of(answer["error"])
        return answer["value"]

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model. Raises ``NeriteError``."""
        self.ask("load", model=model, parameters={name: packed_call(value) for name, value in parameters.items()})

    def unload(self, model: str, *, dependents: bool) -> None:
        """Unload a model. Raises ``NeriteError``."""
        self.ask("unload", model=model, parameters={"unload_dependents": dependents})

    def is_ready(self, model: str, version: str) -> bool:
        """Return whether a model can serve. Raises ``NeriteError``."""
        return bool(self.ask("ready", model=model, version=version))

    def answered(self, number: int, response: InferenceResponse | None, final: bool) -> None:
        """Pass a response to its call. Thread-safe."""
        call = self._open.pop(number, None) if final else self._open.get(number)
        if call is not None:
            call.receive(EMPTY if response is None else response, final)

    def told(self, answer: dict[str, Any]) -> None:
        """Pass a reply to the waiting ``ask``. Thread-safe."""
        answers = self._questions.pop(answer["number"], None)
        if answers is not None:
            answers.append(answer)

    def give_up(self, call: OutgoingCall) -> None:
        """Notify the server that no more responses to a call are wanted, and end it here. Thread-safe."""
        if self.inbox.forked:
            return  # the call is the parent's, which may be waiting for it
        if self._open.pop(call.number, None) is not None:
            self.outbox.send(messages.request_frame(messages.GIVE_UP, call.number, 0))
            call.receive(InferenceResponse.failed(Cancelled("the call was cancelled")), True)

    def _seat(self) -> int:
        """Return the seat of the model whose code is running."""
        seat = at_seat.get()
        if seat is not None:
            return seat
        requests = at_hand.get()
        if requests and isinstance(batch := requests[0].sink, WorkerBatch):
            return batch.number & messages.SEAT
        # A thread of the model's own: with several models in the worker, its seat is unknown.
        return min(self.allowed, default=0)

    def _on_behalf(self, parent: InferenceRequest | None) -> tuple[int, int]:
        """Return the batch, and the index of the request in it, that a call is made for."""
        if parent is not None and isinstance(batch := parent.sink, WorkerBatch):
            index = batch.place(parent)
            if index is not None:
                return batch.number, index
        requests = at_hand.get()
        if requests and isinstance(batch := requests[0].sink, WorkerBatch):
            return batch.number, messages.ALL
        # A thread of the model's own: only if there is exactly one batch, its batch is known.
        numbers = tuple(self._batches)
        return (numbers[0] if len(numbers) == 1 else messages.NO_BATCH), messages.ALL

    def _server_gone(self) -> None:
        """End all calls with an error: the server is gone."""
        while self._open:
            _, call = self._open.popitem()
            call.receive(InferenceResponse.failed(_gone()), True)


def _gone() -> NeriteError:
    return Unavailable("the server has ended")


def packed_call(value: str | bytes) -> str | dict[str, str]:
    """Return a load parameter as JSON."""
    return value if isinstance(value, str) else {"base64": base64.b64encode(value).decode()}


def unpacked_call(value: str | dict[str, str]) -> str | bytes:
    """Return the load parameter that ``packed_call`` encoded."""
    return value if isinstance(value, str) else base64.b64decode(value["base64"])
