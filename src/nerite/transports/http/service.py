"""What is answered on the HTTP port: requests to calls of the server, results to replies."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from nerite.config.options import RestrictedKey
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Restricted, Unsupported
from nerite.core.request import InferenceRequest, Parameter
from nerite.core.response import InferenceResponse
from nerite.transports.http import compression, infer_response, reply, routes, uploads
from nerite.transports.http.administration import Administration, change_log, tell_log
from nerite.transports.http.connection import HttpConnection, too_large
from nerite.transports.http.generate_form import Form
from nerite.transports.http.generation import Generation
from nerite.transports.http.handler import Question
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import Reader
from nerite.transports.http.plan import Plan
from nerite.transports.http.reply import Reply
from nerite.transports.http.uploads import Uploads

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_log = logging.getLogger("nerite.http")
_now = time.monotonic_ns
_LARGE = 64 * 1024


class Target(NamedTuple):
    """What a head leads to. Worked out once for each distinct head; the head keeps it."""

    answer: Reply | None
    """Known without asking anybody: not found, not allowed."""
    refusal: Reply | None
    reader: Reader | None
    """For inference."""
    json_size: int
    """Bytes of the JSON part of an infer request; -1: all of it; 0: none, the body is the tensor."""
    encoding: str
    """How the body is compressed, and empty if it is not."""
    accepts: str
    """How the reply is to be compressed."""
    call: Callable[[HttpConnection, RequestHead, memoryview], None] | None
    """For everything but an infer request of Triton's kinds."""


class HttpService:
    """The handler of every HTTP connection, and the sink of the inferences they bring."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        max_input_size: int,
        restricted: Mapping[str, RestrictedKey],
        forward_pattern: re.Pattern[str] | None = None,
        half_precision: bool = False,
    ) -> None:
        """``restricted`` maps a category to what opens it. ``half_precision``: FP16 and BF16 may stand in JSON."""
        self._server = server
        self._max_input_size = max_input_size
        self._restricted = restricted
        self._forward = forward_pattern
        self._half = half_precision
        self._administration = Administration(server)
        self._uploads = Uploads(server, max_input_size, half_precision)
        self._accepting: Reader | None = None
        """Set while a request is offered: what is answered then was refused, and never ran."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Route a head; return the answer that does not depend on the body, if there is one."""
        target: Target | None = head.route
        if target is None:
            target = head.route = self._target(head)
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
                    self._refuse(connection, target.reader, error, reply.PLAIN)
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

    def handle_again(self, connection: HttpConnection, meaning: tuple[Reader, Plan], data: bytearray) -> None:
        """Answer an inference whose JSON part was seen before on this connection."""
        reader, plan = meaning
        request = InferenceRequest(
            plan.header, [data] if plan.whole else plan.data(memoryview(data), 0), connection, _now(), ""
        )
        connection.request = request
        self._accepting = reader
        try:
            self._server.infer(request)
        except Exception:
            self._failed(connection, connection.head)
        finally:
            self._accepting = None

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
            self._refuse(connection, reader, error)
            return None
        connection.request = request
        self._accepting = reader
        try:
            self._server.infer(request)
        finally:
            self._accepting = None
        return Question(start, (reader, plan)) if plan.again and not target.encoding else None

    def _refuse(
        self, connection: HttpConnection, reader: Reader, error: NeriteError, content_type: str = "application/json"
    ) -> None:
        """Answer a request that is wrong, unless there is nobody to ask: that comes first, and is called text."""
        try:
            self._server.find(reader.model_name, reader.model_version)
        except NeriteError as unknown:
            error, content_type = unknown, reply.PLAIN
        connection.send([reply.error_reply(error, content_type).encode()])

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
                raise too_large(size, self._max_input_size)
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
        if response.error is not None:
            if self._accepting is not None:
                self._refuse(connection, self._accepting, response.error)
            else:
                connection.send([reply.error_reply(response.error, reply.PLAIN).encode()])
            return
        try:
            parts = infer_response.write(request, response, self._server.signature_of, self._half)
        except NeriteError as error:
            parts = [reply.error_reply(error, reply.PLAIN).encode()]
        except Exception:  # a mistake of the model's or ours must not cost the client its answer
            _log.exception("an answer of '%s' could not be written", request.header.model_name)
            parts = [reply.error_reply(Internal("internal error, see the server's log"), reply.PLAIN).encode()]
        target: Target = connection.head.route
        if target.accepts:
            parts = compression.compress_reply(target.accepts, parts)
        connection.send(parts)

    def _target(self, head: RequestHead) -> Target:
        route = routes.find(head.path)
        if route is None:
            return self._plain(answer=reply.NOT_FOUND)
        endpoint = route.endpoint
        refusal = self._locked(endpoint.category, head)
        if refusal is None and head.method not in endpoint.methods:
            # Triton looks at the method early for these, and calls its error text.
            early = endpoint.name in ("infer", "live", "ready", "model_ready")
            return self._plain(answer=reply.NOT_ALLOWED if early else reply.NOT_ALLOWED_JSON)
        if endpoint in routes.NOT_OFFERED:
            error = Unsupported(f"{endpoint.name} is not offered by this version of the server")
            return self._plain(answer=reply.error_reply(error), refusal=refusal)
        if endpoint.name in ("generate", "generate_stream"):
            return self._generation(head, endpoint.name == "generate_stream", refusal, **route.arguments)
        if endpoint.name == "logging":
            return self._plain(refusal=refusal, call=change_log if head.method == "POST" else tell_log)
        if endpoint.name != "infer":
            call = getattr(self._administration, endpoint.name)
            return self._plain(
                refusal=refusal,
                call=lambda connection, _head, body: call(connection, body, **route.arguments),
            )
        if _is_upload(head):
            return self._upload(head, refusal, **route.arguments)
        encoding = head.headers.get("content-encoding", "identity")
        accepts = compression.accepted(head.headers.get("accept-encoding", ""))
        forwarded: dict[str, Parameter] = {}
        json_size = -1
        try:
            forwarded = self._forwarded(head)
            json_size = self._json_size(head)
            compression.check(encoding)
        except NeriteError as error:
            # Clients that ask for too much are told what there is.
            offered = b"" if compression.known(encoding) else b"Accept-Encoding: gzip, deflate\r\n"
            refusal = refusal or reply.error_reply(error, reply.PLAIN)._replace(headers=offered)
        reader = Reader(
            route.arguments["model"], route.arguments["version"], forwarded, self._max_input_size, self._half
        )
        if encoding == "identity":
            encoding = ""
        return Target(None, refusal, reader, json_size, encoding, accepts, None)

    def _upload(self, head: RequestHead, refusal: Reply | None, model: str, version: str) -> Target:
        try:
            reader = Reader(model, version, self._forwarded(head), self._max_input_size, self._half)
            _check_plain(head)
        except NeriteError as error:
            return self._plain(refusal=refusal or reply.error_reply(error))
        content_type = head.headers["content-type"]
        accepts = compression.accepted(head.headers.get("accept-encoding", ""))

        def infer(connection: HttpConnection, _head: RequestHead, body: memoryview) -> None:
            self._uploads.infer(connection, reader, content_type, body)

        return self._plain(refusal=refusal, call=infer)._replace(accepts=accepts)

    def _generation(self, head: RequestHead, events: bool, refusal: Reply | None, model: str, version: str) -> Target:
        try:
            forwarded = self._forwarded(head)
            _check_plain(head)
        except NeriteError as error:
            return self._plain(refusal=refusal or reply.error_reply(error))

        def generate(connection: HttpConnection, _head: RequestHead, body: memoryview) -> None:
            form = Form(self._server.find(model, version, "").signature, forwarded, self._half)
            form.read(bytes(body))
            sink = Generation(connection, events=events, half=self._half)
            request = InferenceRequest(form.header(model, version), form.data, sink, _now(), form.id)
            running = self._server.version_of(request)
            connection.request = request
            running.submit(request)

        return self._plain(refusal=refusal, call=generate)

    def _plain(
        self,
        answer: Reply | None = None,
        refusal: Reply | None = None,
        call: Callable[[HttpConnection, RequestHead, memoryview], None] | None = None,
    ) -> Target:
        return Target(answer, refusal, None, 0, "", "", call)

    def _locked(self, category: str, head: RequestHead) -> Reply | None:
        lock = self._restricted.get(category)
        if lock is None or head.headers.get(lock.header.lower()) == lock.value:
            return None
        refusal = Restricted(f"This API is restricted, expecting header '{lock.header}'")
        return reply.error_reply(refusal, reply.PLAIN)

    def _forwarded(self, head: RequestHead) -> dict[str, Parameter]:
        """Return the headers that are passed on to the model as parameters."""
        if self._forward is None:
            return {}
        forwarded: dict[str, Parameter] = {}
        for name, value in head.fields:
            if self._forward.search(name):
                if name.lower().startswith("triton_"):
                    raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
                forwarded[name] = value
        return forwarded

    def _json_size(self, head: RequestHead) -> int:
        text = head.headers.get("inference-header-content-length")
        if text is None:
            return -1
        try:
            size = int(text)
        except ValueError:
            raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {text}") from None
        if size < 0 or (size > head.content_length > 0 and not head.headers.get("content-encoding")):
            raise InvalidArgument(f"inference header size should be in range (0, {head.content_length}), got: {text}")
        return size


def _is_upload(head: RequestHead) -> bool:
    """Say whether a body is a file or a form. With the header of Triton's binary requests it is one of those."""
    return "inference-header-content-length" not in head.headers and uploads.is_upload(
        head.headers.get("content-type", "")
    )


def _check_plain(head: RequestHead) -> None:
    """Refuse a body that is compressed."""
    if head.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
