"""Routes of inference over HTTP: Triton's infer requests, uploads of files, and ``generate``.

A front process routes only these itself. All other paths of the HTTP port are found by ``router.py``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.inference_entry import TransportEntry
from nerite.transports import access
from nerite.transports.access import Callers, Lock, SenderHeaders, forwarded, idle_caller, key_of, sticky_fields, texts
from nerite.transports.http import content_coding, large_json, reply, uploads
from nerite.transports.http.generate import Generation
from nerite.transports.http.generate_form import GenerateForm
from nerite.transports.http.handler import HTTP, HttpDialect, HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpInferReader, HttpTarget
from nerite.transports.http.json_text import LARGE
from nerite.transports.http.reply import Reply
from nerite.transports.http.request_bodies import MAX_ENTRIES
from nerite.transports.http.routes import Route
from nerite.transports.http.uploads import Uploads

INFERENCES: Final = frozenset(("infer", "generate", "generate_stream"))
"""Names of the endpoints that are routed here."""


class InferenceRouter:
    """Routes heads of inferences to targets."""

    def __init__(
        self,
        server: TransportEntry,
        *,
        max_input_size: int,
        locks: Mapping[str, Lock],
        forward_pattern: re.Pattern[str] | None = None,
        half_precision: bool = False,
        callers: Callers | None = None,
    ) -> None:
        """``locks`` has the key check of each restricted category of endpoints.

        ``half_precision``: FP16 and BF16 are allowed in JSON. Without ``callers`` requests are not identified.
        """
        self._server = server
        self._max_input_size = max_input_size
        self._locks = locks
        self._forward = forward_pattern
        self._half = half_precision
        self._callers = callers
        self._uploads = Uploads(server, max_input_size, half_precision)

    def of_route(self, route: Route, head: RequestHead, dialect: HttpDialect = HTTP) -> HttpTarget:
        """Return the target of the route of an inference, without checking the method."""
        endpoint = route.endpoint
        try:
            for name, value in route.arguments.items():
                checked_name(value, f"the {name} in the path")
        except NeriteError as error:
            return HttpTarget(refusal=self.locked(endpoint.category, head) or reply.error_reply(error))
        if endpoint.name == "infer" and dialect is HTTP and _is_upload(head):
            return self._upload(head, self.locked(endpoint.category, head), **route.arguments)
        if endpoint.name == "infer":
            return self.inference(head, route.arguments["model"], route.arguments["version"], dialect)
        refusal = self.locked(endpoint.category, head)
        return self._generation(head, endpoint.name == "generate_stream", refusal, **route.arguments)

    def locked(self, category: str, head: RequestHead) -> Reply | None:
        """Return the error reply if the request lacks the key that its category needs; else None."""
        return access.key_refusal(self._locks, category, head)

    def inference(self, head: RequestHead, model: str, version: str, dialect: HttpDialect) -> HttpTarget:
        """Return the target of an inference."""
        refusal = self.locked("inference", head)
        encoding, accepts = "identity", ""
        if dialect.compresses:
            encoding = head.headers.get("content-encoding", "identity")
            accepts = content_coding.accepted(head.headers.get("accept-encoding", ""))
        sender = SenderHeaders({})
        json_size = -1
        try:
            sender = self.sender_of(head)
        except NeriteError as error:
            refusal = refusal or dialect.refusal(error, "application/json")
        try:
            json_size = dialect.json_size(head)
            content_coding.check_coding(encoding)
        except NeriteError as error:
            # A client that uses an unsupported coding learns the supported ones.
            offered = b"" if content_coding.known_coding(encoding) else b"Accept-Encoding: gzip, deflate\r\n"
            refusal = refusal or dialect.refusal(error, dialect.early_type)._replace(headers=offered)
        reader = self._reader(sender, model, version)
        if encoding == "identity":
            encoding = ""
        return HttpTarget(None, refusal, reader, json_size, encoding, accepts, None, dialect, self._half)

    def _upload(self, head: RequestHead, refusal: Reply | None, model: str, version: str) -> HttpTarget:
        try:
            reader = self._reader(self.sender_of(head), model, version)
            _check_plain(head)
        except NeriteError as error:
            return HttpTarget(refusal=refusal or reply.error_reply(error))
        content_type = head.headers["content-type"]
        accepts = content_coding.accepted(head.headers.get("accept-encoding", ""))

        def infer(connection: HttpExchange, _head: RequestHead, body: memoryview) -> None:
            self._uploads.infer(connection, reader, content_type, body)

        return HttpTarget(refusal=refusal, accepts=accepts, call=infer, half=self._half)

    def _generation(
        self, head: RequestHead, events: bool, refusal: Reply | None, model: str, version: str
    ) -> HttpTarget:
        try:
            sender = self.sender_of(head)
            _check_plain(head)
        except NeriteError as error:
            return HttpTarget(refusal=refusal or reply.error_reply(error))

        def generate(connection: HttpExchange, _head: RequestHead, body: memoryview) -> None:
            signature = self._server.find(model, version, "").signature
            form = GenerateForm(signature, sender, self._half)

            def submit() -> None:
                sink = Generation(connection, self._server, events=events, half=self._half)
                request = InferenceRequest(form.header(model, version), form.data, sink, time.monotonic_ns(), form.id)
                running = self._server.version_of(request)
                if form.wrong:
                    raise InvalidArgument(form.wrong)
                connection.request = request
                running.submit(request)

            def done(values: list[Any]) -> None:
                large_json.fill(form, values)
                submit()

            if len(body) <= LARGE:
                form.read(bytes(body))
                submit()
                return
            inputs = large_json.tensors_json(signature.inputs.values())
            large_json.InferReading(
                self._server.helpers,
                connection,
                large_json.read_form,
                [body, model, inputs, signature.max_batch_size > 0, self._half],
                done,
                lambda error: connection.send([reply.error_reply(error).encode()]),
            )

        return HttpTarget(refusal=refusal, call=generate)

    def _reader(self, sender: SenderHeaders, model: str, version: str) -> HttpInferReader:
        def limit() -> int:
            signature = self._server.signature(model, version)
            return max(MAX_ENTRIES, len(signature.inputs), len(signature.outputs))

        return HttpInferReader(model, version, sender, self._max_input_size, self._half, limit)

    def sender_of(self, head: RequestHead) -> SenderHeaders:
        """Return the headers that identify the client or are forwarded to models. Raises ``InvalidArgument``."""
        get = texts(head.headers.get)
        caller = head.caller
        if caller is None:
            caller = idle_caller(get) if self._callers is None else self._callers.of(get)
        sticky = sticky_fields(get, self._server.routes.header_names)
        return SenderHeaders(forwarded(head.fields, self._forward), caller, key_of(get), sticky)


def _is_upload(head: RequestHead) -> bool:
    """Return whether the body is a file or a form. With the header of Triton's binary requests it never is."""
    return "inference-header-content-length" not in head.headers and uploads.is_upload(
        head.headers.get("content-type", "")
    )


def _check_plain(head: RequestHead) -> None:
    """Reject a compressed body."""
    if head.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
