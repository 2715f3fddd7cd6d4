"""Dispatches gRPC calls to the inference server, and turns its responses into replies."""

from __future__ import annotations

import asyncio
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from nerite.config.options import CompressionLevel
from nerite.core.byte_budget import GRPC_PLANS, Memo
from nerite.core.errors import Internal, NeriteError, NotLoaded, Restricted
from nerite.core.execution_observer import REQUEST_ID, TraceContext, parse, with_request_id
from nerite.core.failures import report
from nerite.core.headers import parameters_bytes
from nerite.core.request import InferenceRequest, owner_of
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.http2 import RequestHeaders
from nerite.transports import access_log
from nerite.transports.access import Callers, Lock, SenderHeaders, forwarded, idle_caller, key_of, sticky_fields, texts
from nerite.transports.engine_load import FORMAT, LoadSource, load_trailer_of
from nerite.transports.grpc import messages as status
from nerite.transports.grpc import wire
from nerite.transports.grpc.connection import CallTarget, GrpcCall
from nerite.transports.grpc.delays import Delays
from nerite.transports.grpc.infer_request import InferReader, Read, broken
from nerite.transports.grpc.load_reports import METHOD as LOAD_REPORTS
from nerite.transports.grpc.messages import MAX_QUESTION, WINDOWS, MessageReader, OpenedMessage
from nerite.transports.grpc.methods import METHODS, Handler, check_texts
from nerite.transports.grpc.stream import StreamInference, StreamTarget
from nerite.transports.limits import ByteReservation, TransportLimits
from nerite.wire.schema import methods

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry

_REQUEST_ID = REQUEST_ID.encode()
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
_DECOUPLED_ERROR = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_LARGE_MESSAGE = 64 * 1024
_PROTOCOL_HEADERS = frozenset(
    (
        b"content-type",
        b"grpc-accept-encoding",
        b"grpc-encoding",
        b"grpc-tags-bin",
        b"grpc-timeout",
        b"grpc-trace-bin",
        b"te",
    )
)
"""Headers of the gRPC protocol itself. They are not metadata of the call, and are never forwarded."""
_READER_BYTES = 1024
"""Memory of a reader in bytes, apart from the metadata that it forwards."""
_PREFIX_SIZE = 5
_LOAD_FORMAT = FORMAT.encode()
_ZLIB_LEVELS: Mapping[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


class GrpcService:
    """Resolves the target of each call, and memoizes it on the headers, which are shared by equal header blocks."""

    def __init__(
        self,
        server: TransportEntry,
        administration: Callable[[str, str], Handler],
        bounds: TransportLimits,
        *,
        max_message: int,
        locks: Mapping[str, Lock],
        forward_pattern: re.Pattern[str] | None = None,
        compression: CompressionLevel = "none",
        callers: Callers | None = None,
        delays: Delays | None = None,
        load: LoadSource | None = None,
    ) -> None:
        """``administration`` returns the handler of a method, by its path, for all methods but those of inference.

        Its second argument is the owner of shared memory that calls. Without ``callers``, requests carry no caller;
        without ``load``, replies no load of engines.
        """
        self._load = load
        self._server = server
        self._bounds = bounds
        self._max_message = max_message
        self._locks = locks
        self._forward = forward_pattern
        self._level = _ZLIB_LEVELS.get(compression, 0)
        self._callers = callers
        self._delays = delays or Delays({})
        self._readers: Memo[tuple[object, ...], InferReader] = Memo()
        self._administration = administration
        self._methods = methods()

    def target(self, headers: RequestHeaders) -> CallTarget:
        """Return the target of a call, and memoize it on the headers."""
        target = headers.memo = self._build_target(headers)
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None:
            target.timeout = status.timeout_seconds(timeout)
        return target

    def _build_target(self, headers: RequestHeaders) -> CallTarget:
        path = headers.path.decode("latin-1")
        content_type = headers.get(b"content-type") or b""
        if headers.method != b"POST" or not content_type.startswith(b"application/grpc"):
            return _Refused(status.NOT_GRPC)
        category = METHODS.get(path)
        if category is None:
            return _Refused(status.trailers_only(status.UNIMPLEMENTED, ""))
        lock = self._locks.get(category)
        if lock is not None and not lock.opens(headers.get(os.fsencode(lock.header.lower()))):
            refusal = Restricted(f"This protocol is restricted, expecting header '{lock.header}'")
            return _Refused(status.of_error(refusal))
        encoding = (headers.get(b"grpc-encoding") or b"identity").decode("latin-1")
        if encoding not in ("identity", *WINDOWS):
            return _Refused(
                status.trailers_only(status.UNIMPLEMENTED, f"Compression algorithm '{encoding}' is not supported")
            )
        if path in (_INFER, _STREAM):
            try:
                sender = self._sender(headers)
            except NeriteError as error:
                return _Refused(status.of_error(error))
            reader = self._reader(path, sender)
            messages = MessageReader(encoding, self._max_message, self._bounds)
            load = load_trailer_of(headers.get(_LOAD_FORMAT), None if self._load is None else self._load.reports)
            inference = _Inference(self._server, reader, messages, self._reply_encoding(headers), self._level, load)
            outer_span = inference.outer_span = _outer_span(headers)
            if path == _STREAM:
                errors_end_it = headers.get(b"triton_grpc_error") == b"true"
                stream = StreamInference(self._server, inference, errors_end_it, outer_span)
                inference.stream = self._delays.stream(stream)
            return self._delays.target(inference)
        if path == LOAD_REPORTS:
            return _Refused(_NO_LOAD) if self._load is None else _Subscribed(self._load)
        method = self._methods[path]
        messages = MessageReader(encoding, self._max_message if path == _LOAD else MAX_QUESTION, self._bounds)
        owner = ""
        if category == "shared-memory" and self._callers is not None:
            try:
                owner = owner_of(self._sender(headers).caller)
            except NeriteError as error:
                return _Refused(status.of_error(error))
        handler = self._delays.handler(self._administration(path, owner))
        return _Administrative(method.request, handler, messages)

    def _reader(self, path: str, sender: SenderHeaders) -> InferReader:
        """Return the reader for calls to ``path`` from ``sender``."""
        if sender.idempotency_key is not None:  # keys are unique, so a memo would be useless
            return InferReader(sender)
        # Request headers memoize their target, which differs between unary and streaming calls.
        sticky = sender.sticky_fields or {}
        key = (path, sender.caller, *sticky.items(), None, *sorted(sender.forwarded.items()))
        reader = self._readers.get(key)
        if reader is None:
            reader = InferReader(sender)
            wanted_class = "" if sender.caller is None else sender.caller.wanted_class
            size = _READER_BYTES + parameters_bytes({**sticky, **sender.forwarded}) + len(wanted_class)
            GRPC_PLANS.put(self._readers, key, reader, size)
        return reader

    def _sender(self, headers: RequestHeaders) -> SenderHeaders:
        """Return what the metadata say about the sender. Raises ``InvalidArgument``."""

        def raw(name: str) -> str | None:
            value = headers.get(name.encode())
            return None if value is None else value.decode(errors="surrogateescape")

        get = texts(raw)
        if self._callers is None:
            caller = idle_caller(get)
        else:
            timeout = headers.get(b"grpc-timeout")
            caller = self._callers.of(get, None if timeout is None else status.timeout_seconds(timeout))
        fields = (
            (name.decode("latin-1"), value.decode(errors="surrogateescape"))
            for name, value in headers.fields
            if name not in _PROTOCOL_HEADERS
        )
        sticky = sticky_fields(get, self._server.routes.header_names)
        return SenderHeaders(forwarded(fields, self._forward), caller, key_of(get), sticky)

    def _reply_encoding(self, headers: RequestHeaders) -> str:
        if not self._level:
            return ""
        accepted = (headers.get(b"grpc-accept-encoding") or b"").decode("latin-1").replace(" ", "").split(",")
        return next((encoding for encoding in ("gzip", "deflate") if encoding in accepted), "")


def _outer_span(headers: RequestHeaders) -> TraceContext | None:
    """Return the parent span named by the metadata, if any."""
    parent, state, request = headers.get(b"traceparent"), headers.get(b"tracestate"), headers.get(_REQUEST_ID)
    span = None
    if parent is not None:
        span = parse(parent.decode("latin-1"), None if state is None else state.decode("latin-1"))
    return span if request is None else with_request_id(span, request)


class _Refused:
    """Target that refuses every call with the same status."""

    __slots__ = ("refusal", "stream", "timeout")

    outer_span: TraceContext | None = None
    max_message = 0

    def __init__(self, refusal: bytes) -> None:
        self.refusal: bytes | None = refusal
        self.timeout: float | None = None
        self.stream: StreamTarget | LoadSource | None = None

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        raise AssertionError("a refused call has no message")

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        raise AssertionError("a refused call has no message")

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        raise AssertionError("a refused call has no message")

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError("a refused call has no answer")

    def too_large(self, size: int) -> NeriteError:
        raise AssertionError("a refused call has no message")


class _Subscribed(_Refused):
    """Target of the calls that are answered with load reports."""

    __slots__ = ()

    max_message = MAX_QUESTION

    def __init__(self, load: LoadSource) -> None:
        super().__init__(b"")
        self.refusal = None
        self.stream = load


_NO_LOAD = status.trailers_only(
    status.UNIMPLEMENTED, "a server with --front-processes makes no load reports: ask for its metrics instead"
)


class _Inference:
    """Target of ``ModelInfer``, and the message handling that ``ModelStreamInfer`` shares with it."""

    __slots__ = (
        "_level",
        "_load",
        "_messages",
        "_reader",
        "_reply_encoding",
        "_server",
        "head",
        "max_message",
        "outer_span",
        "refusal",
        "stream",
        "timeout",
    )

    def __init__(
        self,
        server: TransportEntry,
        reader: InferReader,
        messages: MessageReader,
        reply_encoding: str,
        level: int,
        load: Callable[[str], bytes] | None,
    ) -> None:
        """``load`` makes the trailer with the load of a model's engines, if the client asks for it."""
        self._load = load
        self.refusal: bytes | None = None
        self.timeout: float | None = None
        self.outer_span: TraceContext | None = None
        self.stream: StreamTarget | None = None
        self.max_message = messages.limit
        self._server = server
        self._reader = reader
        self._messages = messages
        self._reply_encoding = reply_encoding
        self._level = level
        self.head = status.head_with_encoding(reply_encoding) if reply_encoding else status.HEAD

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return a buffer in the model's shared memory for a large request, if possible."""
        if size >= _LARGE_MESSAGE and self._messages.plain:
            name, version, data_at = wire.peek(beginning)
            if name:
                buffer = self._server.receive_buffer(name, version, size, data_at + _PREFIX_SIZE)
                if buffer is not None:
                    return buffer
        return _allocate(size)

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Start the inference if only the tensor data differs from an earlier message; return False otherwise."""
        known = self._reader.known(framed)
        if known is None:
            return False
        request = call.request = InferenceRequest(known[0], known[1], call, monotonic_ns())
        self._server.infer(request, _DECOUPLED_ERROR)
        return True

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Parse the message and start the inference."""
        now = monotonic_ns()
        try:
            content = self._messages.read(framed, self._reader)
        except NeriteError as error:
            self._refuse(call, self._messages.beginning(framed), error)
            return
        if content is None:
            self._messages.read_aside(framed, self._reader, partial(self._resume, call, now))
        else:
            self._begin(call, now, content, framed)

    def _resume(self, call: GrpcCall, now: int, opened: OpenedMessage) -> None:
        """Start an inference whose message was parsed in a thread, unless the call has ended."""
        if not call.go_on(opened.share):
            return
        try:
            if isinstance(opened.content, NeriteError):
                self._refuse(call, opened.message, opened.content)
            else:
                self._begin(call, now, opened.content, memoryview(b""), opened.message)
        except Exception as error:
            call.abandon(report("grpc", error, "in a call"))

    def _begin(
        self, call: GrpcCall, now: int, content: Read, framed: memoryview, message: memoryview | None = None
    ) -> None:
        try:
            request = self._server.request(content[0], content[2], call, now, content[1])
        except NeriteError as error:
            self._refuse(call, self._messages.beginning(framed) if message is None else message, error)
            return
        call.request = request
        self._server.infer(request, _DECOUPLED_ERROR)

    def _refuse(self, call: GrpcCall, message: memoryview, error: NeriteError) -> None:
        """Refuse a request with ``error``, or with the model lookup's error, which takes precedence."""
        name, version, _ = wire.peek(message)
        if name and not isinstance(error, Internal):  # an unreadable message names no model
            try:
                self._server.find(name, version, _DECOUPLED_ERROR)
            except NotLoaded:  # the request is wrong all the same
                pass
            except NeriteError as unknown:
                error = unknown.without_frames()
        access_log.log_refusal(wire.id_of(message), error)
        call.fail(status.of_error(error))

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the response of an inference."""
        if response.error is not None:
            access_log.log_refusal(request.id, response.error)
            call.fail(status.of_error(response.error))
            return
        try:
            parts = wire.write_infer_response(request, response, self._server.signature_of)
        except NeriteError as error:
            call.fail(status.of_error(error))
            return
        except Exception as error:
            failure = report("grpc", error, f"in an answer of '{request.header.model_name}'", request.id)
            call.fail(status.of_error(failure))
            return
        if self._load is None:
            call.reply(self.head, self.packed(parts))
        else:
            call.reply(self.head, self.packed(parts), self._load(request.header.model_name))

    def load_trailer(self, model: str) -> bytes:
        """Return the encoded load report of the engines of a model; empty unless the client asked for it."""
        return b"" if self._load is None else self._load(model)

    def too_large(self, size: int) -> NeriteError:
        """Count an oversized message, and return the error."""
        return self._messages.too_large(size)

    def read(self, framed: memoryview) -> Read | None:
        """Return the parsed message; None if it has to be parsed in a thread. Raises ``NeriteError``."""
        return self._messages.read(framed, self._reader)

    def read_aside(self, framed: memoryview, then: Callable[[OpenedMessage], None]) -> None:
        """Parse a message in a thread, and call ``then`` with the result."""
        self._messages.read_aside(framed, self._reader, then)

    def beginning(self, framed: memoryview) -> memoryview:
        """Return as much of an invalid message as can be had without blocking."""
        return self._messages.beginning(framed)

    def packed(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return a framed message, compressed if the client accepts that."""
        if not self._reply_encoding:
            return parts
        encoder = zlib.compressobj(self._level, zlib.DEFLATED, WINDOWS[self._reply_encoding])
        message = b"".join(parts)[_PREFIX_SIZE:]
        return [status.framed(encoder.compress(message) + encoder.flush(), compressed=True)]


class _Administrative:
    """Target of an administrative method."""

    __slots__ = ("_handle", "_messages", "_request", "_tasks", "max_message", "refusal", "stream", "timeout")

    outer_span: TraceContext | None = None

    def __init__(
        self,
        request: type[Message],
        handle: Handler,
        messages: MessageReader,
    ) -> None:
        self.refusal: bytes | None = None
        self.timeout: float | None = None
        self.stream: StreamTarget | None = None
        self.max_message = messages.limit
        self._request = request
        self._handle = handle
        self._messages = messages
        self._tasks: set[asyncio.Task[Any]] = set()

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Return False: administrative messages are not memoized."""
        return False

    def too_large(self, size: int) -> NeriteError:
        """Count an oversized message, and return the error."""
        return self._messages.too_large(size)

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return a buffer for a message that arrives in pieces."""
        return _allocate(size)

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Parse the message and run the method; a coroutine runs as a task."""
        try:
            request = self._messages.parsed(framed, self._parse)
            if request is None:
                self._messages.parse_aside(framed, self._parse, partial(self._resume, call))
            else:
                self._run(call, request)
        except NeriteError as error:
            self._answer(call, error)

    def _parse(self, message: memoryview) -> Message:
        try:
            request = self._request.FromString(bytes(message))
        except DecodeError:
            raise broken() from None
        check_texts(request)
        return request

    def _resume(self, call: GrpcCall, share: ByteReservation, request: Message | NeriteError) -> None:
        """Run a method whose message was parsed in a thread, unless the call has ended."""
        if not call.go_on(share):
            return
        try:
            if isinstance(request, NeriteError):
                self._answer(call, request)
            else:
                self._run(call, request)
        except NeriteError as error:
            self._answer(call, error)
        except Exception as error:
            call.abandon(report("grpc", error, "in a call"))

    def _run(self, call: GrpcCall, request: Message) -> None:
        work = self._handle(request, partial(self._answer, call))
        if work is not None:
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _answer(self, call: GrpcCall, result: Message | NeriteError) -> None:
        if call.connection.calls.get(call.stream_id) is not call:
            return
        if isinstance(result, NeriteError):
            call.fail(status.of_error(result))
        else:
            call.reply(status.HEAD, [status.framed(result.SerializeToString())])

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError("only inferences are answered this way")


def _allocate(size: int) -> memoryview:
    """Return a buffer for an announced message; it takes no physical memory until bytes arrive."""
    return np.empty(size, np.uint8).data
