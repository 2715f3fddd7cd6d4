"""One exchange of the generate extension: from the first response of a model to the end of the reply."""

from __future__ import annotations

import logging
from typing import Final

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.transports import refusals
from nerite.transports.http import generate_form, reply
from nerite.transports.http.connection import HttpConnection

_log = logging.getLogger("nerite.http")
_EVENTS: Final = "text/event-stream; charset=utf-8"
_NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class Generation:
    """The sink of a request: sends one JSON object, or with ``events`` each response as it comes.

    As with Triton any error of a model is a 400, and only the first response decides on the status. A refusal that
    Triton does not know keeps its own.
    """

    protocol = "HTTP"

    __slots__ = ("_begun", "_connection", "_count", "_events", "_first", "_half")

    def __init__(self, connection: HttpConnection, *, events: bool, half: bool = False) -> None:
        """``half``: FP16 and BF16 are given."""
        self._connection = connection
        self._events = events
        self._half = half
        self._begun = False
        self._count = 0
        self._first = InferenceResponse(None)

    @property
    def outer_span(self) -> TraceContext | None:
        """The span that the request was sent under."""
        return self._connection.outer_span

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response; drop it if the client is gone."""
        connection = self._connection
        if connection.request is not request:
            return
        if self._events:
            self._send_event(request, response)
        elif not response.empty:
            self._count += 1
            self._first = response
        if not final:
            if not connection.writable:
                request.pause(True)
            return
        if not self._events:
            self._send_one(request)
        elif not self._begun:
            connection.open(reply.chunked_head(200, _EVENTS))
        connection.close_reply()

    def _send_one(self, request: InferenceRequest) -> None:
        if self._count == 1:
            text, error = self._written(request, self._first)
        else:
            text, error = generate_form.write_error(InvalidArgument(_NOT_ONE)), None
        self._connection.open(_head(error, "application/json"), text)

    def _send_event(self, request: InferenceRequest, response: InferenceResponse) -> None:
        if response.empty:
            return
        text, error = self._written(request, response)
        event = b"data: " + text + b"\n\n"
        if self._begun:
            self._connection.send_chunk(event)
        else:
            self._begun = True
            self._connection.open(_head(error, _EVENTS), event)

    def _written(self, request: InferenceRequest, response: InferenceResponse) -> tuple[bytes, NeriteError | None]:
        """Return a response as JSON, and the error that it is."""
        error = response.error
        if error is None:
            try:
                return generate_form.write(request, response, self._half), None
            except NeriteError as refusal:
                error = refusal
            except Exception:  # a mistake of the model's or ours must not cost the client its answer
                _log.exception(
                    "an answer of '%s' could not be written",
                    request.header.model_name,
                    extra={"request_id": request.id},
                )
                error = Internal("internal error, see the server's log")
        refusals.note(request.id, error)
        return generate_form.write_error(error), error


def _head(error: NeriteError | None, content_type: str) -> bytes:
    """Return the beginning of the reply that has this error, or none, for its first response."""
    if error is None:
        return reply.chunked_head(200, content_type)
    if not error.plain:
        return reply.chunked_head(400, content_type)
    return reply.chunked_head(error.http_status, content_type, error.retry_after)
