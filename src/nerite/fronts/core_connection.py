"""A front's end of the channel to the core: sends the inferences of its clients, and passes on the responses."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from nerite.core.byte_budget import WORKER_HEADERS
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import report
from nerite.core.headers import whole_header_to_json
from nerite.core.request import CancelReason, InferenceRequest, RequestHeader, SharedMemoryRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import ABSENT, Buffer
from nerite.fronts import messages as kinds
from nerite.fronts.corked_channel import CorkedChannel
from nerite.fronts.groups import GroupWriter, read_group
from nerite.fronts.messages import PROTOCOLS, REASONS, AnswerKind, RelayedPiece
from nerite.regions import RemotePart
from nerite.workers.ipc import codec, messages, shared_memory
from nerite.workers.ipc.shared_memory import Arena, ForeignSegments

_REASON_NUMBERS: Final = {reason: number for number, reason in enumerate(REASONS)}
_PROTOCOL_NUMBERS: Final = {protocol: number for number, protocol in enumerate(PROTOCOLS)}
_OPERATION_NUMBERS: Final = {name: number << kinds.OPERATION_SHIFT for number, name in enumerate(kinds.OPERATIONS)}

TakePiece = Callable[[RelayedPiece, bytes, list[Buffer]], None]
"""Takes the pieces of a relayed reply: kind, name of the work (``work_name``), and data."""


class FrontEvents(Protocol):
    """Takes what the core sends, apart from responses."""

    def start(self, state: bytes, bytes_file: int) -> None:
        """Begin to serve. ``bytes_file`` is memory in which all processes count their bytes in flight."""

    def change(self, state: bytes) -> None:
        """Take over a change of the state that all fronts share."""

    def adopt(self, connection: socket.socket, port: int, limit: int) -> None:
        """Serve an accepted connection."""

    def drain(self, step: kinds.DrainStep) -> None:
        """Take a step of a graceful shutdown."""

    def figures(self) -> dict[str, Any]:
        """Return what this front has counted."""

    def retire(self, share: float, most: float) -> None:
        """Have clients reconnect that send about ``share`` of the requests, and not more than ``most``."""

    def not_loaded(self, model: str, error: NeriteError) -> None:
        """End the requests that wait for a model."""

    def lost(self) -> None:
        """End: the core is gone."""


class CoreConnection(CorkedChannel):
    """Channel to the core. Only for the loop's thread."""

    def __init__(
        self,
        connection: socket.socket,
        descriptors: socket.socket,
        foreign_segments: ForeignSegments,
        events: FrontEvents,
    ) -> None:
        super().__init__("the core", connection, descriptors, Arena(), foreign_segments)
        self._events = events
        self._headers: codec.Packer[RequestHeader] = codec.Packer(
            self._arena,
            self._buffer_leases,
            self._borrower,
            WORKER_HEADERS,
            self._in_foreign_segment,
            whole_header_to_json,
        )
        self._responses = codec.response_unpacker(self._buffer_leases, self._borrower)
        self._groups = GroupWriter(self._headers, kinds.CALLS, self._append)
        self._calls: dict[int, InferenceRequest] = {}
        self._relays: dict[int, TakePiece] = {}
        self._last_number = 0
        self.cancel_reason = CancelReason.CANCELLED
        """Why the request is cancelled that is cancelled next."""

    begin = CorkedChannel._begin

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return shared memory for a large request; None if there is none left."""
        return self._arena.allocate(size)

    def call(self, request: InferenceRequest) -> None:
        """Send a request, whose responses go through ``respond``."""
        number = self._next_number()
        sink = request.sink
        began_ns: int = getattr(sink, "began_ns", 0)
        span: TraceContext | None = getattr(sink, "outer_span", None)
        count = _PROTOCOL_NUMBERS[getattr(sink, "protocol", "HTTP")]
        if operation := getattr(sink, "operation", ""):
            count |= _OPERATION_NUMBERS[operation]
        if request.repeats:
            count |= kinds.REPEATED
        elif not (
            operation or began_ns or span or request.id or request.header.sequence_id or request.header.shared
        ) and self._groups.add(request.header, number, request.buffers, count, request.arrived_ns):
            self._cork()
            self._begun(number, request)
            return
        parts: list[Buffer] = [kinds.call_head(request.arrived_ns, began_ns)]
        uses, data = None, request.buffers
        if isinstance(request, SharedMemoryRequest):
            uses, data = _uses(request)
        packer = self._headers
        packer.begin()
        try:
            packer.record(request.header, request.id, data, parts)
        except Exception as error:
            packer.withdraw()
            failure = (
                error if isinstance(error, NeriteError) else report("channel", error, "while a request was packed")
            )
            request.respond(InferenceResponse.failed(failure))
            return
        if span is not None:
            self._send(kinds.span_frame(span))
        if uses is not None:
            self._send(uses)
        self._begun(number, request)
        self._post(kinds.CALL, number, count, parts)

    def _begun(self, number: int, request: InferenceRequest) -> None:
        self._calls[number] = request
        request.on_cancel = partial(self._cancel, number)
        request.on_pause = partial(self._pause, number)
        request.data = ()  # what was not copied is lent

    def relay_http(
        self, head: bytes, body: memoryview, secure: bool, span: TraceContext | None, take: TakePiece
    ) -> int:
        """Send an HTTP request that the core answers; return its number. ``take`` gets the pieces of the reply."""
        if span is not None:
            self._send(kinds.span_frame(span))
        return self._relay(kinds.RELAY_HTTP, int(secure), b"", [head, body], take)

    def relay_grpc(self, name: str, message: bytes, take: TakePiece) -> int:
        """Send a gRPC message that the core answers; return its number. ``take`` gets the reply."""
        return self._relay(kinds.RELAY_GRPC, 0, name.encode(), [message], take)

    def cancel_relay(self, number: int, why: CancelReason) -> None:
        """Cancel a relayed request: no more pieces are wanted."""
        if self._relays.pop(number, None) is not None:
            self._send(messages.request_frame(kinds.CANCEL, number, _REASON_NUMBERS[why]))

    def pause(self, number: int, paused: bool) -> None:
        """Pause the responses to an inference or a relayed request, or resume them."""
        self._send(messages.request_frame(kinds.PAUSE if paused else kinds.RESUME, number, 0))

    def closed(self, port: int) -> None:
        """Report the end of a connection."""
        self._send(messages.frame(kinds.CLOSED, b"", port))

    def log(self, record: list[Any]) -> None:
        """Have the core log a record, before records of other fronts that a client causes once it has its reply."""
        self._send(messages.json_frame(kinds.LOG, record))
        self._flush()

    def wanted(self, model: str, claims: Mapping[str, int]) -> None:
        """Report the tenants whose requests wait for a model, with the class of each; empty: none does."""
        self._send(messages.json_frame(kinds.WANTED, [model, claims]))

    def acknowledge(self, number: int) -> None:
        """Report that a change of the shared state was taken over."""
        self._send(messages.json_frame(kinds.ACKNOWLEDGE, number))

    def ready(self) -> None:
        """Report that connections can be served."""
        self._send(messages.frame(kinds.READY))

    @property
    def in_flight(self) -> int:
        """Number of requests that the core has not answered."""
        return len(self._calls) + len(self._relays)

    def _relay(self, kind: int, count: int, name: bytes, data: Sequence[Buffer], take: TakePiece) -> int:
        number = self._next_number()
        parts: list[Buffer] = [kinds.buffers_head(name, data)]
        self._headers.begin()
        self._headers.buffers(name, data, parts)
        self._relays[number] = take
        self._post(kind, number, count, parts)
        return number

    def _next_number(self) -> int:
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        return self._last_number

    def _cancel(self, number: int, _request: InferenceRequest) -> None:
        why, self.cancel_reason = self.cancel_reason, CancelReason.CANCELLED
        self._send(messages.request_frame(kinds.CANCEL, number, _REASON_NUMBERS[why]))

    def _pause(self, number: int, _request: InferenceRequest, paused: bool) -> None:
        self.pause(number, paused)

    # Messages of the core.

    def _handle(self, kind: int, count: int, body: memoryview) -> None:
        if kind == kinds.ANSWERS:
            self._answers(body)
        elif kind == kinds.ANSWER:
            self._answer(count, body)
        elif kind == kinds.RELAYED:
            self._relayed(RelayedPiece(count), body)
        elif kind == kinds.CONNECTION:
            self._send(messages.frame(kinds.ADOPTED))
            self._adopt(count, kinds.read_limit(body))
        elif kind == kinds.STATE:
            self._events.change(bytes(body))
        elif kind == kinds.NOT_LOADED:
            model, error = messages.read_json(body)
            self._events.not_loaded(model, messages.error_of(error))
        elif kind == kinds.DRAIN:
            self._events.drain(kinds.DrainStep(count))
        elif kind == kinds.ASK_FIGURES:
            self._send(messages.json_frame(kinds.FIGURES, self._events.figures()))
        elif kind == kinds.RETIRE:
            self._events.retire(*messages.read_json(body))
        elif kind == kinds.START:
            self._events.start(bytes(body), shared_memory.received_descriptors(self._descriptors))

    def _answers(self, body: memoryview) -> None:
        header, numbers, _, records, tokens = read_group(self._responses, body, timed=False)
        calls = self._calls
        for number, data in zip(numbers, records, strict=True):
            request = calls.pop(number, None)
            if request is not None:
                request.respond(InferenceResponse(header, data))
        for token in tokens:
            self._buffer_leases.returned(token)

    def _answer(self, kind: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        response, _ = codec.read_response(self._responses, body, at)
        for token in tokens:
            self._buffer_leases.returned(token)
        request = self._calls.get(number) if kind == AnswerKind.PART else self._calls.pop(number, None)
        if request is None:
            return
        if response is None:
            response = EMPTY
        elif kind == AnswerKind.REFUSED and response.error is not None:
            response.error.refused = True
        request.respond(response, kind != AnswerKind.PART)

    def _relayed(self, piece: RelayedPiece, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        name_size, count, at = kinds.read_buffers_head(body, at)
        name, data, _ = self._responses.buffers(body, at, name_size, count)
        for token in tokens:
            self._buffer_leases.returned(token)
        more = piece in (RelayedPiece.OPEN, RelayedPiece.CHUNK)
        take = self._relays.get(number) if more else self._relays.pop(number, None)
        if take is not None:
            take(piece, name, cast(list[Buffer], data))

    def _adopt(self, port: int, limit: int) -> None:
        """Take over a connection; without a descriptor for it, close it."""
        try:
            descriptor = shared_memory.received_descriptors(self._descriptors)
        except OSError:
            self._descriptors.recv(1)
            self.closed(port)
        else:
            self._events.adopt(socket.socket(fileno=descriptor), port, limit)
        shared_memory.keep_spares()

    def _map(self, **segment: Any) -> None:
        """Map memory of the core or of a worker. It is not offered to others."""
        descriptor = shared_memory.received_descriptors(self._descriptors)
        try:
            self._borrower.add(descriptor=descriptor, **segment)
        finally:
            os.close(descriptor)
            shared_memory.keep_spares()

    def _lost(self) -> None:
        self._events.lost()

    def _kill(self, reason: str) -> None:
        self._events.lost()


def _uses(request: SharedMemoryRequest) -> tuple[bytes, Sequence[Buffer]]:
    """Return the USES message of a request, and its data without what is on GPUs, which the core reads from there."""
    data, places = list(request.buffers), []
    for index, each in enumerate(request.data):
        if isinstance(each, RemotePart):
            data[index] = ABSENT
            places.append((index, each.place.region, each.place.offset, each.place.byte_size))
    return messages.json_frame(kinds.USES, [request.regions, places]), data
