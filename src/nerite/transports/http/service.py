"""What is answered on a port that speaks HTTP: requests to calls of the server, results to replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.transports import refusals
from nerite.transports.http import compression, infer_response, reply
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import Question
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import Reader
from nerite.transports.http.plan import Plan
from nerite.transports.http.reply import Reply
from nerite.transports.http.target import Target

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_log = logging.getLogger("nerite.http")
_now = time.monotonic_ns
_LARGE = 64 * 1024


class HttpService:
    """The handler of every connection to a port, and the sink of the inferences they bring."""

    def __init__(
        self, server: InferenceServer, target_of: Callable[[RequestHead], Target], *, max_input_size: int
    ) -> None:
        """``target_of`` finds what a head leads to."""
        self._server = server
        self._target_of = target_of
        self._max_input_size = max_input_size
        self._accepting = False
        """While a request is offered: what is answered then was refused, and never ran."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Route a head; return the answer that does not depend on the body, if there is one."""
        target: Target | None = head.route
        if target is None:
            target = head.route = self._target_of(head)
        return target.refusal

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return memory of the model's for a large uncompressed infer request."""
        target: Target = head.route
        if target.reader is None or target.encoding or head.content_length < _LARGE:
            return None
        reader = target.reader
        data_at = max(target.json_size, 0)
        return self._server.receive_buffer(reader.model_name, reader.model_version, head.content_length, data_at)

    def handle(self, connection: HttpConnection, head: RequestHead, body: memoryview) -> Question | None:
        """Answer a request. Inferences whose tensors stand behind the JSON part may come again."""
        target: Target = head.route
        try:
            if target.encoding and target.reader is not None:
                try:
                    body = compression.decompress(body, self._max_input_size)
                except NeriteError as error:
                    self._refuse(connection, target, error, reply.PLAIN)
                    return None
            if target.reader is not None:
                return self._infer(connection, target, target.reader, body)
            if target.answer is not None:
                connection.send([target.answer.encode()])
            else:
                assert target.call is not None
                target.call(connection, head, body)
        except NeriteError as error:
            connection.send([reply.error_reply(error).encode()])
        except Exception:
            self._failed(connection, head)
        return None

    def handle_again(self, connection: HttpConnection, plan: Plan, data: bytearray) -> None:
        """Answer an inference whose JSON part was seen before on this connection."""
        given = [data] if plan.whole else plan.data(memoryview(data), 0)
        if plan.header.shared:
            try:
                request = self._server.request(plan.header, given, connection, _now(), "")
            except NeriteError as error:
                self._refuse(connection, connection.head.route, error)
                return
        else:
            request = InferenceRequest(plan.header, given, connection, _now(), "")
        connection.request = request
        self._accepting = True
        try:
            self._server.infer(request)
        except Exception:
            self._failed(connection, connection.head)
        finally:
            self._accepting = False

    def _failed(self, connection: HttpConnection, head: RequestHead) -> None:
        """Answer after a mistake of ours, which must not cost the client its answer."""
        _log.exception("a request to %s could not be handled", head.path)
        connection.send([reply.error_reply(Internal("internal error, see the server's log")).encode()])

    def _infer(self, connection: HttpConnection, target: Target, reader: Reader, body: memoryview) -> Question | None:
        now = _now()
        try:
            plan, start = self._plan(target, reader, body)
            request = self._server.request(plan.header, plan.data(body, start), connection, now, plan.id)
        except NeriteError as error:
            self._refuse(connection, target, error)
            return None
        connection.request = request
        self._accepting = True
        try:
            self._server.infer(request)
        finally:
            self._accepting = False
        return Question(start, plan) if plan.repeats and not target.encoding else None

    def _refuse(
        self, connection: HttpConnection, target: Target, error: NeriteError, content_type: str = "application/json"
    ) -> None:
        """Answer a request that is wrong, unless there is nobody to ask: that comes first."""
        assert target.reader is not None
        try:
            self._server.find(target.reader.model_name, target.reader.model_version)
        except NeriteError as unknown:
            error, content_type = unknown, target.dialect.early_type
        refusals.note(connection.request.id if connection.request is not None else "", error)
        connection.send([target.dialect.refusal(error, content_type).encode()])

    def _plan(self, target: Target, reader: Reader, body: memoryview) -> tuple[Plan, int]:
        """Return how to read a body, and where in it the tensors begin. Raises Triton's errors."""
        size = len(body)
        json_size = target.json_size
        if json_size > 0:
            if json_size > size:
                raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
            plan = reader.plan(bytes(body[:json_size]))
        elif json_size < 0 and size:
            json_size = size
            if size > self._max_input_size:
                raise reply.too_large(size, self._max_input_size)
            plan = reader.plan(bytes(body))
        else:
            json_size = 0
            plan = reader.raw(self._server.signature(reader.model_name, reader.model_version), body)
        if json_size + plan.size != size:
            raise self._wrong_size(reader, plan, size - json_size)
        return plan, json_size

    def _wrong_size(self, reader: Reader, plan: Plan, given: int) -> NeriteError:
        """Return what is wrong with the bytes behind the JSON part."""
        for spec, place in zip(plan.header.inputs, plan.places, strict=True):
            if isinstance(place, tuple) and place[1] > given:
                return InvalidArgument(
                    f"unexpected size for input '{spec.name}', expecting {place[1] - given} additional bytes "
                    f"for model '{reader.model_name}'"
                )
        return InvalidArgument(f"unexpected additional input data for model '{reader.model_name}'")

    def answer(self, connection: HttpConnection, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the answer of an inference."""
        target: Target = connection.head.route
        if response.error is not None:
            if self._accepting:
                self._refuse(connection, target, response.error)
            else:
                refusals.note(request.id, response.error)
                connection.send([target.dialect.refusal(response.error, reply.PLAIN).encode()])
            return
        try:
            parts = infer_response.write(request, response, self._server.signature_of, target.dialect, target.half)
        except NeriteError as error:
            parts = [target.dialect.refusal(error, reply.PLAIN).encode()]
        except Exception:  # a mistake of the model's or ours must not cost the client its answer
            _log.exception(
                "an answer of '%s' could not be written", request.header.model_name, extra={"request_id": request.id}
            )
            mistake = Internal("internal error, see the server's log")
            parts = [target.dialect.refusal(mistake, reply.PLAIN).encode()]
        if target.accepts:
            parts = compression.compress_reply(target.accepts, parts)
        connection.send(parts)
