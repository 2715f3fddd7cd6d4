"""Several requests of a model that have one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.core.request import GaveUp, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.transports import refusals
from nerite.transports.openai.errors import reply_of
from nerite.transports.openai.sampling import in_words_of_client

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange


_AT_ONCE: Final = 64
"""Requests that are submitted in one turn of the loop."""


class JointWork:
    """The sink of the requests. To its connection it is what runs: paused and cancelled as one.

    What it becomes is said in ``_take``; the first error of any of them is the answer.
    """

    protocol = "HTTP"
    fields: Mapping[str, str] = MappingProxyType({})
    """The fields that the client wrote, by the names that the model has for them."""

    def __init__(self, connection: HttpExchange) -> None:
        self.header = RequestHeader("", "", ())
        """What the first request asks for."""
        self.id = ""
        """Its id."""
        self._connection = connection
        self._requests: Sequence[InferenceRequest] = ()
        self._places: dict[int, int] = {}
        """Where each request stands, by its identity."""
        self._closed = False
        """Nobody waits for anything any more."""

    @property
    def outer_span(self) -> TraceContext | None:
        """The span that the requests were sent under."""
        return self._connection.outer_span

    def begin(self, requests: Sequence[InferenceRequest], submit: Callable[[InferenceRequest], None]) -> None:
        """Ask the model: all of it, but so that other requests have their turn meanwhile."""
        self._requests = requests
        self.header, self.id = requests[0].header, requests[0].id
        self._places = {id(request): place for place, request in enumerate(requests)}
        self._connection.request = self
        self._submit_from(0, submit)

    def _submit_from(self, place: int, submit: Callable[[InferenceRequest], None]) -> None:
        for request in self._requests[place : place + _AT_ONCE]:
            if self._closed:  # one was refused at once
                return
            submit(request)
        if place + _AT_ONCE < len(self._requests):
            self._soon(self._submit_from, place + _AT_ONCE, submit)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Go on in the next turn of the loop, if somebody waits for it then."""

        def go_on() -> None:
            if self._closed or self._connection.request is not self:
                return
            first = self._requests[0]
            try:
                call(*arguments)
            except NeriteError as error:
                self._fail(first, error)
            except Exception as error:
                self._fail(first, report("openai", error, f"for '{self.header.model_name}'", self.id))
            if self._closed:
                self._requests = ()

        asyncio.get_running_loop().call_soon(go_on)

    def cancel(self, why: GaveUp = GaveUp.CANCELLED) -> None:
        """Stop all that runs: nobody waits for it."""
        self._closed = True
        for request in self._requests:
            request.cancel(why)

    def pause(self, paused: bool) -> None:
        """Have the model wait, or go on."""
        for request in self._requests:
            request.pause(paused)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response; drop it if nobody waits for it any more."""
        if not self._closed and self._connection.request is self:
            self._respond(request, response, final)
        if self._closed:
            self._requests = ()  # they know this, and what knows each other waits for the collector

    def _respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        if response.error is not None:  # not raised: what knows its own traceback waits for the collector, too
            self._fail(request, response.error)
            return
        try:
            self._take(self._places[id(request)], response, final)
        except NeriteError as error:
            self._fail(request, error)
        except Exception as error:
            failure = report("openai", error, f"in an answer of '{request.header.model_name}'", request.id)
            self._fail(request, failure)
        else:
            if not final and not self._connection.writable:
                request.pause(True)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        """Take what a request is answered. Raises ``NeriteError`` for what is no answer."""
        raise NotImplementedError

    def _fail(self, request: InferenceRequest, error: NeriteError) -> None:
        """Stop the rest, and answer with an error."""
        refusals.note(request.id, error)
        self.cancel()
        self._answer_error(in_words_of_client(error, self.fields))

    def _answer_error(self, error: NeriteError) -> None:
        self._connection.send([reply_of(error).encode()])
