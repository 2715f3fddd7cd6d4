"""What is answered on the gRPC port: calls to calls of the server, results to replies."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from nerite.config.options import CompressionLevel
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Restricted
from nerite.core.request import InferenceRequest, Parameter
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.core.trace_context import TraceContext, parse
from nerite.http2 import Headers
from nerite.transports import refusals
from nerite.transports.callers import Callers, Sender, key_of
from nerite.transports.grpc import infer_response, infer_wire, status
from nerite.transports.grpc.connection import Call
from nerite.transports.grpc.infer_request import InferReader
from nerite.transports.grpc.methods import METHODS, Administration, Handler
from nerite.transports.grpc.stream import StreamTarget
from nerite.transports.grpc.stream_service import StreamInference
from nerite.transports.keys import Lock
from nerite.wire.schema import methods

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_log = logging.getLogger("nerite.grpc")
_now = time.monotonic_ns
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_NOT_IN_ONE = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_LARGE = 64 * 1024
_PREFIX = 5
_LEVELS: Mapping[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}
_WINDOWS = {"gzip": 31, "deflate": 15}


class GrpcService:
    """Finds the target of each call. Targets are kept on the headers, which repeat."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        locks: Mapping[str, Lock],
        forward_pattern: re.Pattern[str] | None = None,
        compression: CompressionLevel = "none",
        callers: Callers | None = None,
    ) -> None:
        """Without ``callers`` nobody wants to know who asks."""
        self._server = server
        self._locks = locks
        self._forward = forward_pattern
        self._level = _LEVELS.get(compression, 0)
        self._callers = callers
        self._readers: dict[tuple[object, ...], InferReader] = {}
        self._administration = Administration(server)
        self._methods = methods()

    def target(self, headers: Headers) -> _Target:
        """Return the target of a call, and leave it on the headers, which repeat."""
        target = headers.memo = self._find(headers)
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None:
            target.timeout = status.timeout_seconds(timeout)
        return target

    def _find(self, headers: Headers) -> _Target:
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
        if encoding not in ("identity", *_WINDOWS):
            return _Refused(
                status.trailers_only(status.UNIMPLEMENTED, f"Compression algorithm '{encoding}' is not supported")
            )
        if path in (_INFER, _STREAM):
            try:
                sender = self._sender(headers)
            except NeriteError as error:
                return _Refused(status.of_error(error))
            reader = self._reader(path, sender)
            inference = _Inference(self._server, reader, encoding, self._reply_encoding(headers), self._level)
            outer_span = inference.outer_span = _outer_span(headers)
            if path == _STREAM:
                inference.stream = StreamInference(
                    self._server, reader, inference, headers.get(b"triton_grpc_error") == b"true", outer_span
                )
            return inference
        method = self._methods[path]
        return _Administrative(method.request, self._administration.handler(path), encoding)

    def _reader(self, path: str, sender: Sender) -> InferReader:
        """Return what reads the messages of calls like this one."""
        if sender.idempotency_key is not None:  # there are no others
            return InferReader(sender)
        # Headers remember where they lead to, which is not the same for both.
        key = (path, sender.caller, *sorted(sender.forwarded.items()))
        reader = self._readers.get(key)
        if reader is None:
            if len(self._readers) >= 256:
                self._readers.clear()
            reader = self._readers[key] = InferReader(sender)
        return reader

    def _sender(self, headers: Headers) -> Sender:
        """Return what the metadata say of who sent them. Raises ``InvalidArgument``."""

        def get(name: str) -> str | None:
            value = headers.get(name.encode())
            return None if value is None else value.decode("latin-1")

        caller = None
        if self._callers is not None:
            timeout = headers.get(b"grpc-timeout")
            caller = self._callers.of(get, None if timeout is None else status.timeout_seconds(timeout))
        return Sender(self._forwarded(headers), caller, key_of(get))

    def _forwarded(self, headers: Headers) -> dict[str, Parameter]:
        """Return the metadata that is passed on to the model as parameters."""
        forwarded: dict[str, Parameter] = {}
        if self._forward is None:
            return forwarded
        for raw_name, raw_value in headers.fields:
            name = raw_name.decode("latin-1")
            if self._forward.search(name):
                if name.startswith("triton_"):
                    raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
                forwarded[name] = raw_value.decode("latin-1")
        return forwarded

    def _reply_encoding(self, headers: Headers) -> str:
        if not self._level:
            return ""
        accepted = (headers.get(b"grpc-accept-encoding") or b"").decode("latin-1").replace(" ", "").split(",")
        return next((encoding for encoding in ("gzip", "deflate") if encoding in accepted), "")


def _outer_span(headers: Headers) -> TraceContext | None:
    """Return the span that a call is made under."""
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    if parent is None:
        return None
    return parse(parent.decode("latin-1"), None if state is None else state.decode("latin-1"))


class _Refused:
    """Answers every call with the same status."""

    __slots__ = ("refusal", "stream", "timeout")

    outer_span: TraceContext | None = None

    def __init__(self, refusal: bytes) -> None:
        self.refusal: bytes | None = refusal
        self.timeout: float | None = None
        self.stream: StreamTarget | None = None

    def start_known(self, call: Call, framed: bytes | memoryview) -> bool:
        raise AssertionError("a refused call has no message")

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        raise AssertionError("a refused call has no message")

    def start(self, call: Call, framed: memoryview) -> None:
        raise AssertionError("a refused call has no message")

    def answer(self, call: Call, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError("a refused call has no answer")


class _Inference:
    """``ModelInfer``; for ``ModelStreamInfer`` what the two have in common."""

    __slots__ = (
        "_encoding",
        "_level",
        "_reader",
        "_reply_encoding",
        "_server",
        "head",
        "outer_span",
        "refusal",
        "stream",
        "timeout",
    )

    def __init__(
        self, server: InferenceServer, reader: InferReader, encoding: str, reply_encoding: str, level: int
    ) -> None:
        self.refusal: bytes | None = None
        self.timeout: float | None = None
        self.outer_span: TraceContext | None = None
        self.stream: StreamTarget | None = None
        self._server = server
        self._reader = reader
        self._encoding = encoding
        self._reply_encoding = reply_encoding
        self._level = level
        self.head = status.head_with_encoding(reply_encoding) if reply_encoding else status.HEAD

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return memory of the model's for a large request."""
        if size >= _LARGE and self._encoding == "identity":
            name, version, data_at = infer_wire.peek(beginning)
            if name:
                buffer = self._server.receive_buffer(name, version, size, data_at + _PREFIX)
                if buffer is not None:
                    return buffer
        return _room(size)

    def start_known(self, call: Call, framed: bytes | memoryview) -> bool:
        """Run an inference if only its data is new."""
        known = self._reader.known(framed)
        if known is None:
            return False
        request = call.request = InferenceRequest(known[0], known[1], call, _now())
        self._server.infer(request, _NOT_IN_ONE)
        return True

    def start(self, call: Call, framed: memoryview) -> None:
        """Run an inference."""
        now = _now()
        try:
            header, request_id, data = self._reader.read(_unpacked(framed, self._encoding))
            request = self._server.request(header, data, call, now, request_id)
        except NeriteError as error:
            error = self._first_mistake(framed, error)
            refusals.note(infer_wire.id_of(framed[_PREFIX:]), error)
            call.fail(status.of_error(error))
            return
        call.request = request
        self._server.infer(request, _NOT_IN_ONE)

    def _first_mistake(self, framed: memoryview, error: NeriteError) -> NeriteError:
        """Return what is wrong with a request: ``error``, unless there is nobody to ask, which comes first."""
        if isinstance(error, Internal):  # the message cannot be read
            return error
        name, version, _ = infer_wire.peek(_unpacked(framed, self._encoding))
        if name:
            try:
                self._server.find(name, version, _NOT_IN_ONE)
            except NeriteError as unknown:
                return unknown
        return error

    def answer(self, call: Call, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the answer."""
        if response.error is not None:
            refusals.note(request.id, response.error)
            call.fail(status.of_error(response.error))
            return
        try:
            parts = infer_response.write(request, response, self._server.signature_of)
        except NeriteError as error:
            call.fail(status.of_error(error))
            return
        except Exception:  # a mistake of the model's or ours must not cost the client its answer
            _log.exception(
                "an answer of '%s' could not be written", request.header.model_name, extra={"request_id": request.id}
            )
            call.fail(status.MISTAKE)
            return
        call.reply(self.head, self.packed(parts))

    def unpacked(self, framed: memoryview) -> memoryview:
        """Return a message without its length, decompressed. Raises ``NeriteError``."""
        return _unpacked(framed, self._encoding)

    def packed(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return a message with its length, compressed if the client wants it."""
        if not self._reply_encoding:
            return parts
        encoder = zlib.compressobj(self._level, zlib.DEFLATED, _WINDOWS[self._reply_encoding])
        message = b"".join(parts)[_PREFIX:]
        return [status.framed(encoder.compress(message) + encoder.flush(), compressed=True)]


class _Administrative:
    """A method that is not an inference."""

    __slots__ = ("_encoding", "_handle", "_request", "_tasks", "refusal", "stream", "timeout")

    outer_span: TraceContext | None = None

    def __init__(
        self,
        request: type[Message],
        handle: Handler,
        encoding: str,
    ) -> None:
        self.refusal: bytes | None = None
        self.timeout: float | None = None
        self.stream: StreamTarget | None = None
        self._request = request
        self._handle = handle
        self._encoding = encoding
        self._tasks: set[asyncio.Task[Any]] = set()

    def start_known(self, call: Call, framed: bytes | memoryview) -> bool:
        """Know no message: nothing here is worth it."""
        return False

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return memory for a message that comes in pieces."""
        return _room(size)

    def start(self, call: Call, framed: memoryview) -> None:
        """Run the method; a coroutine goes on by itself."""

        def answer(result: Message | NeriteError) -> None:
            if call.connection.calls.get(call.stream_id) is not call:
                return
            if isinstance(result, NeriteError):
                call.fail(status.of_error(result))
            else:
                call.reply(status.HEAD, [status.framed(result.SerializeToString())])

        try:
            request = self._request.FromString(bytes(_unpacked(framed, self._encoding)))
            work = self._handle(request, answer)
        except DecodeError:
            answer(Internal("Unable to parse request"))
        except NeriteError as error:
            answer(error)
        else:
            if work is not None:
                task = asyncio.get_running_loop().create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def answer(self, call: Call, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError("only inferences are answered this way")


_Target = _Refused | _Inference | _Administrative


def _room(size: int) -> memoryview:
    """Return memory for a message that is only announced so far: it costs nothing before the bytes come."""
    return np.empty(size, np.uint8).data


def _unpacked(framed: memoryview, encoding: str) -> memoryview:
    """Return the message behind its five bytes, decompressed if they say so. Raises ``NeriteError``."""
    if not framed[0]:
        return framed[_PREFIX:]
    if encoding == "identity":
        raise Internal("a compressed message came without grpc-encoding")
    decoder = zlib.decompressobj(_WINDOWS[encoding])
    try:
        plain = decoder.decompress(framed[_PREFIX:], _MAX_PLAIN + 1)
    except zlib.error as error:
        raise Internal(f"failed to decompress the message: {error}") from None
    if len(plain) > _MAX_PLAIN or not decoder.eof:
        raise Internal("failed to decompress the message: it is incomplete or too large")
    return memoryview(bytearray(plain))


_MAX_PLAIN = 2**31 - 1
