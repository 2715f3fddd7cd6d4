"""Handler of HTTP ports: turns requests into calls of the server, and their results into replies.

Inference requests take the path in this file; all other endpoints are calls that the router finds (``router.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from nerite.core.errors import InvalidArgument, NeriteError, NotLoaded
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.text import quoted_text
from nerite.observability.log import log
from nerite.transports import access_log, output_parameters
from nerite.transports.http import content_coding, infer_response, large_json, reply
from nerite.transports.http.awaited_load import AwaitedLoad
from nerite.transports.http.handler import HttpExchange, HttpQuestion
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpInferReader, HttpTarget
from nerite.transports.http.json_text import LARGE
from nerite.transports.http.reply import Reply
from nerite.transports.http.request_bodies import HttpInferPlan
from nerite.transports.limits import ByteReservation, TransportLimits

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry

_LARGE = 64 * 1024
_METHODS: Final = {"GET": 0, "HEAD": 1, "POST": 2, "PUT": 3, "DELETE": 4, "OPTIONS": 8}
"""Numbers of methods in Triton's log."""
_MAX_COMPRESSED_ON_LOOP = 1024 * 1024
"""Limit in bytes for compressing outputs on the event loop; compressing this much takes about 10 ms."""


class HttpService:
    """Handler of every connection to a port: answers requests, and sends the responses of their inferences."""

    def __init__(
        self,
        server: TransportEntry,
        target_of: Callable[[RequestHead], HttpTarget],
        bounds: TransportLimits,
        *,
        max_input_size: int,
    ) -> None:
        """``target_of`` routes a head."""
        self._server = server
        self._target_of = target_of
        self._bounds = bounds
        self._max_input_size = max_input_size
        self._submitting = False
        """True while a request is being submitted: an error reported meanwhile is a rejection; the model never ran."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Route a head; return its error reply if it is rejected whatever its body is."""
        if log.verbose_level:  # Triton writes the number that its HTTP library has for the method
            log.verbose(1, f"HTTP request: {_METHODS.get(head.method, head.method)} {quoted_text(head.path)}")
        target: HttpTarget | None = head.route
        if target is None:
            target = head.route = self._target_of(head)
        return target.refusal

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return memory that the model's worker maps, for a large uncompressed infer request."""
        target: HttpTarget = head.route
        if target.reader is None or target.encoding or head.content_length < _LARGE:
            return None
        reader = target.reader
        data_at = max(target.json_size, 0)
        return self._server.receive_buffer(reader.model_name, reader.model_version, head.content_length, data_at)

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        """Answer a request. Inferences whose tensors follow the JSON part are repeatable."""
        target: HttpTarget = head.route
        try:
            if target.encoding and target.reader is not None:
                try:
                    plain = content_coding.decompress_small(body, self._max_input_size)
                except NeriteError as error:
                    self._refuse(connection, target, error, reply.PLAIN)
                    return None
                if plain is None:
                    self._decompress_in_thread(connection, target, body)
                    return None
                body = plain
            if target.reader is not None:
                return self._infer(connection, target, target.reader, body)
            if target.answer is not None:
                connection.send([target.answer.encode()])
            else:
                assert target.call is not None
                target.call(connection, head, body)
        except NotLoaded as absent:
            again = partial(self._call_again, target, connection, head, body)
            refuse = partial(self._send_error, connection)
            AwaitedLoad(self._server.waits, connection, absent.without_frames(), head.caller, again, refuse)
        except NeriteError as error:
            self._send_error(connection, error)
        except Exception as error:
            self._failed(connection, head, error)
        return None

    def _call_again(self, target: HttpTarget, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Answer a request that has waited for its model."""
        assert target.call is not None
        try:
            target.call(connection, head, body)
        except NeriteError as error:
            self._send_error(connection, error)
        except Exception as error:
            self._failed(connection, head, error)

    def _send_error(self, connection: HttpExchange, error: NeriteError) -> None:
        connection.send([reply.error_reply(error).encode()])

    def _decompress_in_thread(self, connection: HttpExchange, target: HttpTarget, body: memoryview) -> None:
        """Decompress the body of an inference in a thread, then answer it."""
        share = ByteReservation(self._bounds.bytes)
        work = partial(content_coding.decompress, body, self._max_input_size, share.take_or_raise)
        self._bounds.aside.run("http", work, partial(self._decompressed, connection, target, share))

    def _decompressed(
        self, connection: HttpExchange, target: HttpTarget, share: ByteReservation, body: memoryview | NeriteError
    ) -> None:
        if connection.gone:
            share.give_back()
            return
        connection.hold(share)
        try:
            if isinstance(body, NeriteError):
                self._refuse(connection, target, body, reply.PLAIN)
            else:
                assert target.reader is not None
                self._infer(connection, target, target.reader, body)
        except Exception as error:
            self._failed(connection, connection.head, error)

    def handle_again(self, connection: HttpExchange, plan: HttpInferPlan, data: bytearray) -> None:
        """Answer an inference whose JSON part this connection remembers."""
        given = [data] if plan.whole else plan.data(memoryview(data), 0)
        if plan.header.shared:
            try:
                request = self._server.request(plan.header, given, connection, monotonic_ns(), "")
            except NeriteError as error:
                self._refuse(connection, connection.head.route, error)
                return
        else:
            request = InferenceRequest(plan.header, given, connection, monotonic_ns(), "")
        connection.request = request
        self._submitting = True
        try:
            self._server.infer(request)
        except Exception as error:
            self._failed(connection, connection.head, error)
        finally:
            self._submitting = False

    def _failed(self, connection: HttpExchange, head: RequestHead, error: Exception) -> None:
        """Report an unexpected exception, and reply with its incident number."""
        failure = report("http", error, f"in a request to {quoted_text(head.path)}")
        connection.send([reply.error_reply(failure).encode()])

    def _infer(
        self, connection: HttpExchange, target: HttpTarget, reader: HttpInferReader, body: memoryview
    ) -> HttpQuestion | None:
        now = monotonic_ns()
        try:
            json_size = self._json_size(target, body)
            if json_size > LARGE:
                self._infer_in_helper(connection, target, reader, body, json_size, now)
                return None
            if json_size:
                plan = reader.plan(bytes(body[:json_size]))
            else:
                plan = reader.raw(self._server.signature(reader.model_name, reader.model_version), body)
            self._submit(connection, reader, plan, body, json_size, now)
        except NotLoaded as absent:
            again = partial(self._infer_again, connection, target, reader, body)
            refuse = partial(self._refuse, connection, target)
            AwaitedLoad(self._server.waits, connection, absent.without_frames(), reader.caller, again, refuse)
            return None
        except NeriteError as error:
            self._refuse(connection, target, error)
            return None
        return HttpQuestion(json_size, plan, plan.footprint) if plan.repeats and not target.encoding else None

    def _infer_again(
        self, connection: HttpExchange, target: HttpTarget, reader: HttpInferReader, body: memoryview
    ) -> None:
        """Answer an inference that has waited for its model."""
        try:
            self._infer(connection, target, reader, body)
        except Exception as error:
            self._failed(connection, connection.head, error)

    def _infer_in_helper(
        self,
        connection: HttpExchange,
        target: HttpTarget,
        reader: HttpInferReader,
        body: memoryview,
        json_size: int,
        now: int,
    ) -> None:
        """Parse the JSON part in a helper process, then answer the inference.

        Raises ``NeriteError`` if the model is not found.
        """
        signature = self._server.find(reader.model_name, reader.model_version).signature

        def done(values: list[Any]) -> None:
            plan, wrong = reader.plan_of(values)
            if wrong:
                signature.bind(plan.header, plan.id)
                raise InvalidArgument(wrong)
            self._submit(connection, reader, plan, body, json_size, now)

        arguments = [body[:json_size], reader.model_name, reader.max_size, reader.half, reader.most()]
        refuse = partial(self._refuse, connection, target)
        large_json.InferReading(self._server.helpers, connection, large_json.read_infer, arguments, done, refuse)

    def _submit(
        self,
        connection: HttpExchange,
        reader: HttpInferReader,
        plan: HttpInferPlan,
        body: memoryview,
        start: int,
        now: int,
    ) -> None:
        """Submit a parsed inference; the data behind its JSON part begins at offset ``start``."""
        if start + plan.size != len(body):
            raise self._wrong_size(reader, plan, len(body) - start)
        request = self._server.request(plan.header, plan.data(body, start), connection, now, plan.id)
        connection.request = request
        self._submitting = True
        try:
            self._server.infer(request)
        finally:
            self._submitting = False

    def _refuse(
        self, connection: HttpExchange, target: HttpTarget, error: NeriteError, content_type: str = "application/json"
    ) -> None:
        """Send ``error``, or the error that the model is not found, which takes precedence."""
        assert target.reader is not None
        try:
            self._server.find(target.reader.model_name, target.reader.model_version)
        except NotLoaded:  # the request is wrong all the same, or its model could not be loaded
            pass
        except NeriteError as unknown:
            error, content_type = unknown.without_frames(), target.dialect.early_type
        access_log.log_refusal(connection.request.id if connection.request is not None else "", error)
        connection.send([target.dialect.refusal(error, content_type).encode()])

    def _json_size(self, target: HttpTarget, body: memoryview) -> int:
        """Return the size of the JSON part of a body; 0 if it has none. Raises Triton's errors."""
        size = len(body)
        json_size = target.json_size
        if json_size > 0:
            if json_size > size:
                raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
            return json_size
        return size if json_size else 0

    def _wrong_size(self, reader: HttpInferReader, plan: HttpInferPlan, given: int) -> NeriteError:
        """Return the error for a wrong number of bytes behind the JSON part."""
        for spec, place in zip(plan.header.inputs, plan.places, strict=True):
            if isinstance(place, tuple) and place[1] > given:
                return InvalidArgument(
                    f"unexpected size for input '{spec.name}', expecting {place[1] - given} additional bytes "
                    f"for model '{reader.model_name}'"
                )
        return InvalidArgument(f"unexpected additional input data for model '{reader.model_name}'")

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the reply to an inference."""
        target: HttpTarget = connection.head.route
        if response.error is not None:
            if (self._submitting or response.error.refused) and not response.error.begun:
                self._refuse(connection, target, response.error)
            else:
                access_log.log_refusal(request.id, response.error)
                connection.send([target.dialect.refusal(response.error, reply.PLAIN).encode()])
            return
        try:
            parts = []
            if not (target.accepts and sum(map(len, response.data)) > _MAX_COMPRESSED_ON_LOOP):
                parts = infer_response.write_infer_response(
                    request, response, self._server.signature_of, target.dialect, target.half, LARGE
                )
            if not parts:
                self._write_in_helper(connection, target, request, response)
                return
        except NeriteError as error:
            parts = [target.dialect.refusal(error, reply.PLAIN).encode()]
        except Exception as error:
            failure = report("http", error, f"in a response of '{request.header.model_name}'", request.id)
            parts = [target.dialect.refusal(failure, reply.PLAIN).encode()]
        if target.accepts:
            parts = content_coding.compress_reply(target.accepts, parts)
        connection.send(parts)

    def _write_in_helper(
        self, connection: HttpExchange, target: HttpTarget, request: InferenceRequest, response: InferenceResponse
    ) -> None:
        """Have a helper process write the reply to an inference. Raises ``NeriteError``."""
        assert response.header is not None
        placed = {output.name for output in request.header.outputs if output.place is not None}
        data = list(response.buffers)
        for place, spec in enumerate(response.header.outputs):
            if spec.name in placed:
                output_parameters.write_to_region(request, spec, data[place])
                data[place] = b""

        def done(parts: list[Any], error: NeriteError | None) -> None:
            if connection.request is not request:
                return
            connection.send(parts if error is None else [target.dialect.refusal(error, reply.PLAIN).encode()])

        arguments = large_json.infer_arguments(
            request,
            InferenceResponse(response.header, data),
            self._server.signature_of(request),
            target.dialect,
            target.half,
            target.accepts,
        )
        large_json.write_in_helper(self._server.helpers, large_json.write_infer, arguments, done)
