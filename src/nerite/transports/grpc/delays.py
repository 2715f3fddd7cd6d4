"""Artificial delays of gRPC calls, for tests of clients, configured by Triton's environment variables.

Triton's threads sleep. Here only the affected call waits. Without such a variable no wrapper is installed.
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
"""Seconds by which the replies of administrative calls are delayed."""
PROCESS: Final = "TRITONSERVER_DELAY_GRPC_PROCESS"
"""Milliseconds by which the start of a ModelInfer call is delayed."""
ENTRY: Final = "TRITONSERVER_DELAY_GRPC_PROCESS_ENTRY"
"""Like ``PROCESS``, and also for each request on a stream."""
ANSWERS: Final = ("TRITONSERVER_DELAY_RESPONSE_COMPLETE_EXEC", "TRITONSERVER_DELAY_RESPONSE_COMPLETION")
"""Milliseconds by which the reply of a ModelInfer call is delayed."""
COMPLETE: Final = "TRITONSERVER_DELAY_GRPC_COMPLETE"
"""Milliseconds by which each response on a stream is delayed."""
RESPONSE: Final = "TRITONSERVER_DELAY_GRPC_RESPONSE"
"""Like ``COMPLETE``, for decoupled models only."""
WITHOUT_EFFECT: Final = ("TRITONSERVER_DELAY_GRPC_NOTIFICATION", "TRITONSERVER_DELAY_GRPC_ENQUEUE")
"""Provoke a race between two of Triton's threads while a request is cancelled; Nerite has a single thread here."""
_NUMBER: Final = re.compile(r"\s*([+-]?\d{1,9})")


class Delays:
    """Delays requested by the environment, in seconds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the variables."""
        known = (ADMINISTRATION, PROCESS, ENTRY, *ANSWERS, COMPLETE, RESPONSE)
        given = {name: environment[name] for name in known if name in environment}
        self._invalid = {name: value for name, value in given.items() if _NUMBER.match(value) is None}
        found = {name: _number(value) for name, value in given.items()}
        milliseconds = {name: found.get(name, 0) / 1000 for name in known}
        self._administration = float(found.get(ADMINISTRATION, 0))
        self._start = milliseconds[PROCESS] + milliseconds[ENTRY]
        self._answer = sum(milliseconds[name] for name in ANSWERS)
        self._entry = milliseconds[ENTRY]
        self._complete = milliseconds[COMPLETE]
        self._response = milliseconds[RESPONSE]
        self._active = [f"{name}={value}" for name, value in found.items() if value]
        self._active += [f"{name} (ignored)" for name in WITHOUT_EFFECT if name in environment]

    def report(self) -> None:
        """Log the variables that are set, and those that are invalid."""
        for name, value in self._invalid.items():
            log.error(f"Unable to parse the debug variable {name}. Value provided: '{value}' is not a valid integer.")
        if self._active:
            delays = ", ".join(self._active)
            log.warning(f"gRPC calls are delayed for tests of clients, as set in the environment: {delays}")

    def handler(self, handler: Handler) -> Handler:
        """Wrap the handler of an administrative method so that its replies are delayed."""
        return partial(_answer_late, handler, self._administration) if self._administration else handler

    def target(self, target: CallTarget) -> CallTarget:
        """Wrap a target of unary inferences so that their start and reply are delayed."""
        return _LateTarget(target, self._start, self._answer) if self._start or self._answer else target

    def stream(self, stream: StreamTarget) -> StreamTarget:
        """Wrap a target of streams so that requests and responses are delayed."""
        if not (self._entry or self._complete or self._response):
            return stream
        return _LateStream(stream, self._entry, self._complete, self._response)


def _number(value: str) -> int:
    """Return the number at the start of a value; 0 if it is negative or missing, as in Triton."""
    found = _NUMBER.match(value)
    return max(0, int(found[1])) if found is not None else 0


def call_later(seconds: float, work: Callable[[], object]) -> None:
    """Call ``work`` on the running event loop after a delay."""
    asyncio.get_running_loop().call_later(seconds, work)


def _answer_late(handler: Handler, seconds: float, request: Any, answer: Answer) -> Coroutine[Any, Any, None] | None:
    def late(result: Message | NeriteError) -> None:
        call_later(seconds, partial(answer, result))

    try:
        return handler(request, late)
    except NeriteError as error:
        late(error.without_frames())
        return None


class _LateTarget:
    """Target of unary inferences that delays their start and reply."""

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
        """Return False, so that every message goes through ``start``."""
        return False

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Start a call after the delay, unless it has ended."""

        def start() -> None:
            if call.connection.calls.get(call.stream_id) is call:
                self._target.start(call, framed)

        call_later(self._start, start)

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send a reply after the delay, unless the call has ended."""

        def answer() -> None:
            if call.request is request:
                self._target.answer(call, request, response)

        call_later(self._answer, answer)


class _LateStream:
    """Target of streams that delays requests and responses."""

    def __init__(self, stream: StreamTarget, entry: float, complete: float, response: float) -> None:
        self.head = stream.head
        self.errors_end_it = stream.errors_end_it
        self.outer_span = stream.outer_span
        self.max_message = stream.max_message
        self.receive_buffer = stream.receive_buffer
        self.too_large = stream.too_large
        self.write = stream.write
        self.write_refusal = stream.write_refusal
        self.load_trailer = stream.load_trailer
        self._stream = stream
        self._entry = entry
        self._complete = complete
        self._response = response

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin an inference, after the delay if there is one."""
        late = cast(StreamCall, _LateCall(call, self._complete, self._response))
        if not self._entry:
            return self._stream.infer(late, framed)

        def begin() -> None:
            if call.connection.calls.get(call.stream_id) is call and self._stream.infer(late, framed):
                call.proceed()

        call_later(self._entry, begin)
        return False


class _LateCall:
    """Stands in for the stream of one request: each response waits for the previous one, then for the delay."""

    def __init__(self, call: StreamCall, complete: float, response: float) -> None:
        self._call = call
        self._seconds = complete
        self._response = response
        self._waiting: deque[tuple[InferenceRequest, InferenceResponse, bool]] = deque()

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the stream."""
        return getattr(self._call, name)

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Record a request that is in progress."""
        if decoupled:
            self._seconds += self._response
        self._call.begin(request, decoupled)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Queue a response."""
        self._waiting.append((request, response, final))
        if len(self._waiting) == 1:
            call_later(self._seconds, self._next)

    def _next(self) -> None:
        self._call.respond(*self._waiting[0])
        self._waiting.popleft()
        if self._waiting:
            call_later(self._seconds, self._next)
