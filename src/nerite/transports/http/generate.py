"""Sends the responses of a generate request: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.transports import access_log
from nerite.transports.http import generate_form, large_json, reply
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.json_text import LARGE

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry

_EVENTS: Final = "text/event-stream; charset=utf-8"
_NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class Generation:
    """Sink of a generate request: sends one JSON object or, with ``events``, each response as it arrives.

    As in Triton, any error of a model is a 400, and only the first response determines the status. Errors that Triton
    does not have keep their own status.
    """

    protocol = "HTTP"

    __slots__ = ("_begun", "_connection", "_count", "_events", "_first", "_half", "_server", "_waiting")

    def __init__(self, connection: HttpExchange, server: TransportEntry, *, events: bool, half: bool = False) -> None:
        """``half``: FP16 and BF16 are allowed."""
        self._connection = connection
        self._server = server
        self._events = events
        self._half = half
        self._begun = False
        self._count = 0
        self._first = InferenceResponse(None)
        self._waiting: deque[tuple[InferenceResponse, bool]] = deque()
        """The response that a helper is writing, and those queued behind it, each with its ``final`` flag."""

    @property
    def outer_span(self) -> TraceContext | None:
        """The trace context of the client."""
        return self._connection.outer_span

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Send or queue a response; drop it if the client is gone."""
        connection = self._connection
        if connection.request is not request:
            return
        if not self._events:
            if not response.empty:
                self._count += 1
                self._first = response
            if final:
                response = self._first if self._count == 1 else EMPTY
        if final or self._events:
            if self._waiting or _is_large(response):
                self._waiting.append((response, final))
                if len(self._waiting) == 1:
                    self._write_in_helper(request)
            else:
                self._send(request, response, final)
        if not final and (self._waiting or not connection.writable):
            request.pause(True)

    def _send(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        if self._count == 1 or (self._events and not response.empty):
            self._send_text(*self._written(request, response))
        elif final and not self._events:
            self._send_text(generate_form.write_generate_error(InvalidArgument(_NOT_ONE)), None)
        if final:
            self._close()

    def _send_text(self, text: bytes, error: NeriteError | None) -> None:
        """Send the JSON of a response or error."""
        if self._events:
            text = b"data: " + text + b"\n\n"
        if self._begun:
            self._connection.send_chunk(text)
        else:
            self._begun = True
            self._connection.open(_head(error, self._content_type), text)

    def _close(self) -> None:
        if not self._begun:
            self._connection.open(_head(None, self._content_type))
        self._connection.close_reply()

    @property
    def _content_type(self) -> str:
        return _EVENTS if self._events else "application/json"

    def _write_in_helper(self, request: InferenceRequest) -> None:
        """Have a helper write the first queued response; once it is sent, continue with the others."""
        connection = self._connection

        def done(values: list[Any], error: NeriteError | None) -> None:
            if connection.request is not request:
                return
            _, final = self._waiting.popleft()
            if error is None:
                self._send_large(values[0])
            else:
                self._send_text(self._error_text(request, error), error)
            if final:
                self._close()
            while self._waiting and not _is_large(self._waiting[0][0]):
                self._send(request, *self._waiting.popleft())
            if self._waiting:
                self._write_in_helper(request)
            elif not final and connection.writable:
                request.pause(False)

        arguments = large_json.generate_arguments(request, self._waiting[0][0], self._half)
        large_json.write_in_helper(self._server.helpers, large_json.write_generate, arguments, done)

    def _send_large(self, text: memoryview) -> None:
        """Send the JSON of a large response without copying it."""
        if not self._begun:
            self._begun = True
            self._connection.open(_head(None, self._content_type))
        self._connection.send_pieces([b"data: ", text, b"\n\n"] if self._events else [text])

    def _written(self, request: InferenceRequest, response: InferenceResponse) -> tuple[bytes, NeriteError | None]:
        """Return the JSON of a response, and its error, if any."""
        error = response.error
        if error is None:
            try:
                return generate_form.write_generate(request, response, self._half), None
            except NeriteError as refusal:
                error = refusal.without_frames()
            except Exception as failure:
                error = report("http", failure, f"in a response of '{request.header.model_name}'", request.id)
        return self._error_text(request, error), error

    @staticmethod
    def _error_text(request: InferenceRequest, error: NeriteError) -> bytes:
        access_log.log_refusal(request.id, error)
        return generate_form.write_generate_error(error)


def _is_large(response: InferenceResponse) -> bool:
    """Return whether a response is too large to be written as JSON on the event loop."""
    return sum(map(len, response.data)) > LARGE


def _head(error: NeriteError | None, content_type: str) -> bytes:
    """Return the head of a reply whose first response has this error, or none."""
    if error is None:
        return reply.chunked_head(200, content_type)
    if not error.plain:
        return reply.chunked_head(400, content_type)
    return reply.chunked_head(error.http_status, content_type, error.retry_after)
