"""Delays of gRPC that tests of clients ask for, by the environment variables that Triton has for this.

Triton's threads sleep. Here a call waits, and no other one with it; without such a variable none of this is in use.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf.message import Message

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.observability.log import log
from nerite.transports.grpc.methods import Answer, Handler
from nerite.transports.grpc.stream import StreamCall, StreamTarget

if TYPE_CHECKING:
    from nerite.transports.grpc.connection import CallTarget, GrpcCall

ADMINISTRATION: Final = "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC"
"""Seconds that the answer of a call takes longer that is no inference."""
PROCESS: Final = "TRITONSERVER_DELAY_GRPC_PROCESS"
"""Milliseconds until a call of ModelInfer begins."""
ENTRY: Final = "TRITONSERVER_DELAY_GRPC_PROCESS_ENTRY"
"""The same, and for each request on a stream."""
ANSWERS: Final = ("TRITONSERVER_DELAY_RESPONSE_COMPLETE_EXEC", "TRITONSERVER_DELAY_RESPONSE_COMPLETION")
"""Milliseconds that the answer of ModelInfer takes longer."""
COMPLETE: Final = "TRITONSERVER_DELAY_GRPC_COMPLETE"
"""Milliseconds that each response on a stream takes longer."""
RESPONSE: Final = "TRITONSERVER_DELAY_GRPC_RESPONSE"
"""The same, of models that are decoupled."""
WITHOUT_EFFECT: Final = ("TRITONSERVER_DELAY_GRPC_NOTIFICATION", "TRITONSERVER_DELAY_GRPC_ENQUEUE")
"""These have two of Triton's threads meet while a request is cancelled; there is one thread here."""
_NUMBER: Final = re.compile(r"\s*([+-]?\d{1,9})")


class Delays:
    """What the environment asks for, in seconds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the variables, and log those that are set."""
        known = (ADMINISTRATION, PROCESS, ENTRY, *ANSWERS, COMPLETE, RESPONSE)
        found = {name: _number(name, environment[name]) for name in known if name in environment}
        milliseconds = {name: found.get(name, 0) / 1000 for name in known}
        self._administration = float(found.get(ADMINISTRATION, 0))
        self._start = milliseconds[PROCESS] + milliseconds[ENTRY]
        self._answer = sum(milliseconds[name] for name in ANSWERS)
        self._entry = milliseconds[ENTRY]
        self._complete = milliseconds[COMPLETE]
        self._response = milliseconds[RESPONSE]
        told = [f"{name}={value}" for name, value in found.items() if value]
        told += [f"{name} (without effect here)" for name in WITHOUT_EFFECT if name in environment]
        if told:
            log.warning(f"gRPC is delayed, as the environment asks for tests of clients: {', '.join(told)}")

    def handler(self, handler: Handler) -> Handler:
        """Return a handler of a method that is no inference, whose answers come late."""
        return partial(_answer_late, handler, self._administration) if self._administration else handler

    def target(self, target: CallTarget) -> CallTarget:
        """Return a target of unary inferences that begins late, and answers late."""
        return _LateTarget(target, self._start, self._answer) if self._start or self._answer else target

    def stream(self, stream: StreamTarget) -> StreamTarget:
        """Return a target of streams that begins late, and responds late."""
        if not (self._entry or self._complete or self._response):
            return stream
        return _LateStream(stream, self._entry, self._complete, self._response)


def _number(name: str, value: str) -> int:
    """Return the number that a variable begins with, 0 for one below zero or for none at all, as Triton does."""
    found = _NUMBER.match(value)
    if found is None:
        log.error(f"Unable to parse the debug variable {name}. Value provided: '{value}' is not a valid integer.")
    return max(0, int(found[1])) if found is not None else 0


def _later(seconds: float, work: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(seconds, work)


def _answer_late(handler: Handler, seconds: float, request: Any, answer: Answer) -> Coroutine[Any, Any, None] | None:
    def late(result: Message | NeriteError) -> None:
        _later(seconds, partial(answer, result))

    try:
        return handler(request, late)
    except NeriteError as error:
        late(error.without_frames())
        return None


class _LateTarget:
    """The target of unary inferences."""

    def __init__(self, target: CallTarget, start: float, answer: float) -> None:
        self.stream = target.stream
        self.refusal = target.refusal
        self.timeout = target.timeout
        self.max_message = target.max_message
        self.outer_span = target.outer_span
        self.receive_buffer = target.receive_buffer
        self.too_large = target.too_large
        self._target = target
        self._start = start
        self._answer = answer

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Know no message, so that each comes to ``start``."""
        return False

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Begin a call, if its client still waits when its time has come."""

        def start() -> None:
            if call.connection.calls.get(call.stream_id) is call:
                self._target.start(call, framed)

        _later(self._start, start)

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Answer a call, if its client still waits when its time has come."""

        def answer() -> None:
            if call.request is request:
                self._target.answer(call, request, response)

        _later(self._answer, answer)


class _LateStream:
    """The target of streams."""

    def __init__(self, stream: StreamTarget, entry: float, complete: float, response: float) -> None:
        self.head = stream.head
        self.errors_end_it = stream.errors_end_it
        self.outer_span = stream.outer_span
        self.max_message = stream.max_message
        self.receive_buffer = stream.receive_buffer
        self.too_large = stream.too_large
        self.write = stream.write
        self.write_refusal = stream.write_refusal
        self._stream = stream
        self._entry = entry
        self._complete = complete
        self._response = response

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin an inference, later if that is asked for."""
        late = cast(StreamCall, _LateCall(call, self._complete, self._response))
        if not self._entry:
            return self._stream.infer(late, framed)

        def begin() -> None:
            if call.connection.calls.get(call.stream_id) is call and self._stream.infer(late, framed):
                call.proceed()

        _later(self._entry, begin)
        return False


class _LateCall:
    """A stream as one of its requests knows it: each response waits for the one before, and then for its time."""

    def __init__(self, call: StreamCall, complete: float, response: float) -> None:
        self._call = call
        self._seconds = complete
        self._response = response
        self._waiting: deque[tuple[InferenceRequest, InferenceResponse, bool]] = deque()

    def __getattr__(self, name: str) -> Any:
        """Be the stream in all else."""
        return getattr(self._call, name)

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Note that the request is under way."""
        if decoupled:
            self._seconds += self._response
        self._call.begin(request, decoupled)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response."""
        self._waiting.append((request, response, final))
        if len(self._waiting) == 1:
            _later(self._seconds, self._next)

    def _next(self) -> None:
        self._call.respond(*self._waiting[0])
        self._waiting.popleft()
        if self._waiting:
            _later(self._seconds, self._next)
