"""The core's end of the channel to one front: submits the inferences of its clients, and sends the responses back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from google.protobuf.message import Message

from nerite.core.byte_budget import WORKER_HEADERS
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.headers import whole_header_from_json
from nerite.core.request import CancelReason, InferenceRequest, RequestHeader, SharedMemoryInput, owner_of
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.fronts import messages as kinds
from nerite.fronts.balancer import Move
from nerite.fronts.corked_channel import CorkedChannel
from nerite.fronts.groups import GroupWriter, read_group
from nerite.fronts.messages import PROTOCOLS, REASONS, AnswerKind, RelayedPiece
from nerite.fronts.relayed_exchange import RelayedExchange
from nerite.fronts.shared_state import FrontStart, SharedState
from nerite.llm.openai import text_model
from nerite.transports.grpc.methods import METHODS, Answer
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import HeadCache
from nerite.workers.host.fork_server import ForkedProcess
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc.shared_memory import Arena, ForeignSegments

if TYPE_CHECKING:
    from nerite.server import InferenceServer


_Uses: TypeAlias = tuple[Sequence[tuple[str, int]], Sequence[tuple[int, str, int, int]]]
"""What a USES message says."""
_MAX_ADOPTING: Final = 64
"""Maximum number of connections that a front has been handed and has not taken over."""
SILENT: Final = 2
"""Number of measurements from which a front that does not answer gets no connections, and no reply waits for it."""


class FrontOwner(Protocol):
    """The pool, as a connection sees it."""

    @property
    def http_handler(self) -> HttpHandler:
        """Answers relayed HTTP requests."""

    def administer(self, path: str, owner: str, content: bytes, answer: Answer) -> None:
        """Answer a relayed gRPC message of an owner of shared memory."""

    def publish(self) -> None:
        """Send what has changed to all fronts."""

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        """Send a reply once all fronts know what has changed until now."""

    def acknowledged(self) -> None:
        """Take note that a front has taken over a change."""

    def ready(self, front: FrontConnection) -> None:
        """Take note that a front can serve."""

    def log(self, record: list[Any]) -> None:
        """Log a record of a front."""

    def counted(self, front: FrontConnection, figures: Mapping[str, Any]) -> None:
        """Add what a front has counted since its last report."""

    def lost(self, front: FrontConnection) -> None:
        """Replace a front whose channel has ended."""


class FrontRequest(InferenceRequest):
    """An inference of a front."""

    __slots__ = ("number",)

    number: int
    """Its number on the channel."""

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Pass on a response; the usual one, small and the only one of its request, at once to its group."""
        sink, header = self.sink, response.header
        if final and header is not None and type(sink) is FrontSink and not self.finished:
            try:
                if sink.connection.answer_in_group(self.number, header, response.buffers):
                    self.finished = True
                    self.on_cancel = self.on_pause = None
                    return
            except Exception as error:
                self.sink_failed(error, response)
                return
        super().respond(response, final)


class RepeatedFrontRequest(FrontRequest):
    """A request for one more completion of another request's prompt."""

    __slots__ = ()

    repeats = True


class RegionFrontRequest(FrontRequest):
    """A request that uses shared memory regions of its client."""

    __slots__ = ("__weakref__",)

    shares_memory = True


class FrontSink:
    """Sink of inferences of one front; what traces need to know of them."""

    __slots__ = ("began_ns", "connection", "outer_span", "protocol")

    def __init__(
        self, connection: FrontConnection, protocol: str, began_ns: int = 0, outer_span: TraceContext | None = None
    ) -> None:
        self.connection = connection
        self.protocol = protocol
        self.began_ns = began_ns
        self.outer_span = outer_span

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Send a response to the front, in its group if another sink has seen it first."""
        assert isinstance(request, FrontRequest)
        header = response.header
        if not final or header is None or not self.connection.answer_in_group(request.number, header, response.buffers):
            self.connection.answer(request, response, final)


class CompletionSink(FrontSink):
    """Sink of one request of the OpenAI API, which counts tokens for its trace."""

    __slots__ = ("_operation", "_tokens")

    def __init__(
        self, connection: FrontConnection, protocol: str, began_ns: int, outer_span: TraceContext | None, operation: str
    ) -> None:
        super().__init__(connection, protocol, began_ns, outer_span)
        self._operation = operation
        self._tokens = text_model.TokenCounts()

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Send a response to the front, and count its tokens if the request is observed, as by a trace."""
        if request.sink is not self and response.error is None:
            with contextlib.suppress(ValueError):  # the front reports it
                self._tokens.add(text_model.read(response))
        super().respond(request, response, final)

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return the span attributes of the request."""
        return self._tokens.span_attributes(self._operation, request.header.model_name)


class FrontConnection(CorkedChannel):
    """Channel to one front. Only for the loop's thread."""

    def __init__(
        self,
        process: ForkedProcess,
        foreign_segments: ForeignSegments,
        server: InferenceServer,
        owner: FrontOwner,
        most_connections: int,
    ) -> None:
        """The front has descriptors for ``most_connections``."""
        arena = Arena()
        super().__init__(process.name, process.channel, process.descriptors, arena, foreign_segments)
        foreign_segments.host(arena)
        self.process = process
        self._server = server
        self._owner = owner
        self._headers = codec.Unpacker[RequestHeader](self._buffer_leases, self._borrower, whole_header_from_json)
        self._responses: codec.Packer[ResponseHeader] = codec.Packer(
            arena, self._buffer_leases, self._borrower, WORKER_HEADERS, self._in_foreign_segment
        )
        self._groups = GroupWriter(self._responses, kinds.ANSWERS, self._append)
        self._sinks = [FrontSink(self, protocol) for protocol in PROTOCOLS]
        """Sinks of all inferences that have nothing special, by protocol."""
        self._submitting = False
        """An error that is reported meanwhile is a rejection."""
        self.calls: dict[int, FrontRequest] = {}
        """Inferences that are not answered, by number."""
        self.exchanges: dict[int, RelayedExchange] = {}
        """Relayed HTTP requests that are not answered, by number."""
        self._span: TraceContext | None = None
        self._uses: _Uses | None = None
        self.acknowledged = 0
        """Number of the last STATE message that the front has taken over."""
        self.ready = False
        self.calls_begun = 0
        """Number of inferences so far."""
        self.connections = [0] * len(kinds.PORTS)
        """Number of open connections of each port."""
        self.figures: dict[str, Any] = {}
        """What the front has counted, as of its last report."""
        self.silent = 0
        """Number of measurements in a row since its last answer."""
        self._asked: deque[asyncio.Future[None]] = deque()
        """Questions for figures that are not answered."""
        self._most_connections = most_connections
        self._adopting = 0
        """Number of connections that were handed over and are not taken over."""
        self._closed = False
        self._heads = HeadCache()

    def start(self, loop: asyncio.AbstractEventLoop, start: FrontStart, bytes_file: int) -> None:
        """Begin, with what the front needs to know; ``bytes_file`` is memory that all processes share."""
        self._begin(loop)
        self._send_descriptor(bytes_file)
        self._send(messages.frame(kinds.START, pickle.dumps(start)))

    def send_change(self, number: int, change: SharedState) -> None:
        """Send a change of the state that all fronts share."""
        self._send(messages.frame(kinds.STATE, pickle.dumps((number, change))))

    @property
    def responsive(self) -> bool:
        """Whether the front serves, and answers."""
        return self.ready and self.silent < SILENT

    @property
    def accepts(self) -> bool:
        """Whether the front can be handed one more connection."""
        room = sum(self.connections) < self._most_connections
        return room and self.responsive and self._adopting < _MAX_ADOPTING

    def hand_over(self, descriptor: int, port: int, limit: int) -> bool:
        """Hand over an accepted connection; return False if the front takes none at the moment."""
        try:
            socket.send_fds(self._descriptors, [b"."], [descriptor], socket.MSG_DONTWAIT)
        except OSError:
            return False
        self._adopting += 1
        self.connections[port] += 1
        self._send(kinds.connection_frame(port, limit))
        return True

    def drain(self, step: kinds.DrainStep) -> None:
        """Have the front take a step of a graceful shutdown."""
        self._send(messages.frame(kinds.DRAIN, b"", step))

    def ask_figures(self) -> asyncio.Future[None]:
        """Ask for ``figures``; return a future that is done with the answer, or the end of the front."""
        assert self._loop is not None
        answered: asyncio.Future[None] = self._loop.create_future()
        self._asked.append(answered)
        self._send(messages.frame(kinds.ASK_FIGURES))
        return answered

    def measure(self) -> None:
        """Ask whether the front still answers, or count that it does not."""
        if self._asked:
            self.silent += 1
        else:
            self.ask_figures()

    def retire(self, move: Move) -> None:
        """Have clients reconnect, so that their requests go to other fronts."""
        self._send(messages.json_frame(kinds.RETIRE, [move.share, move.most]))

    def answer_in_group(self, number: int, header: ResponseHeader, data: Sequence[Buffer]) -> bool:
        """Send the only response to a call in a group; return False if that is not possible."""
        if number not in self.calls or not self._groups.add(header, number, data, AnswerKind.LAST):
            return False
        del self.calls[number]
        self._cork()
        return True

    def answer(self, request: FrontRequest, response: InferenceResponse, final: bool) -> None:
        """Send a response to a call; drop it if the front no longer waits."""
        number = request.number
        if final:
            if self.calls.pop(number, None) is None:
                return
            kind = AnswerKind.REFUSED if self._submitting and response.error is not None else AnswerKind.LAST
        elif number in self.calls:
            kind = AnswerKind.PART
        else:
            return
        self._post(kinds.ANSWER, number, kind, codec.sendable_response(self._responses, response))

    def relayed(self, number: int, piece: RelayedPiece, data: Sequence[Buffer], name: bytes = b"") -> None:
        """Send a piece of a relayed reply; drop it if the front is gone. ``name``: see ``work_name``."""
        if self._closed:
            return
        parts: list[Buffer] = [kinds.buffers_head(name, data)]
        self._responses.begin()
        self._responses.buffers(name, data, parts)
        self._post(kinds.RELAYED, number, piece, parts)

    # Messages of the front.

    def _handle(self, kind: int, count: int, body: memoryview) -> None:
        if kind == kinds.CALLS:
            self._calls(count, body)
        elif kind == kinds.CALL:
            self._call(count, body)
        elif kind == kinds.CANCEL:
            self._cancel(messages.batch_number(body), REASONS[count])
        elif kind in (kinds.PAUSE, kinds.RESUME):
            self._pause(messages.batch_number(body), kind == kinds.PAUSE)
        elif kind == kinds.SPAN:
            self._span = kinds.read_span(body)
        elif kind == kinds.USES:
            self._uses = messages.read_json(body)
        elif kind == kinds.RELAY_HTTP:
            self._relay_http(bool(count), body)
        elif kind == kinds.RELAY_GRPC:
            self._relay_grpc(body)
        elif kind == kinds.ADOPTED:
            self._adopting -= 1
        elif kind == kinds.CLOSED:
            self.connections[count] -= 1
        elif kind == kinds.ACKNOWLEDGE:
            self.acknowledged = messages.read_json(body)
            self._owner.acknowledged()
        elif kind == kinds.LOG:
            self._owner.log(messages.read_json(body))
        elif kind == kinds.FIGURES:
            figures = messages.read_json(body)
            self._owner.counted(self, figures)
            self.figures = figures
            self.silent = 0
            _done(self._asked.popleft())
        elif kind == kinds.WANTED:
            if self._server.demand is not None:
                self._server.demand.want(self, *messages.read_json(body))
        elif kind == kinds.READY:
            self.ready = True
            self._owner.ready(self)

    def _call(self, count: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        arrived_ns, began_ns, at = kinds.read_call_head(body, at)
        header, name, data, _ = self._headers.record(body, at)
        if tokens:
            for token in tokens:
                self._buffer_leases.returned(token)
        assert isinstance(header, RequestHeader)
        span, self._span = self._span, None
        sink = self._sinks[count & 1]
        if operation := kinds.OPERATIONS[count >> kinds.OPERATION_SHIFT]:
            sink = CompletionSink(self, sink.protocol, began_ns, span, operation)
        elif began_ns or span is not None:
            sink = FrontSink(self, sink.protocol, began_ns, span)
        kind = RepeatedFrontRequest if count & kinds.REPEATED else FrontRequest
        if self._uses:
            kind = RegionFrontRequest
        request = kind(header, data, sink, arrived_ns, name)
        request.number = number
        self.calls[number] = request
        self.calls_begun += 1
        self._submitting = True
        if not self._uses or self._in_regions(request):
            self._server.infer(request, "")
        self._submitting = False

    def _in_regions(self, request: FrontRequest) -> bool:
        """Find the tensors of a request on GPUs, and keep the regions that it uses; answer it if that is not possible.

        Return whether it was possible.
        """
        assert self._uses is not None
        (used, inputs), self._uses = self._uses, None
        regions, header = self._server.regions, request.header
        owner = owner_of(header.caller)
        try:
            regions.use_for_front(request, used)
            data = list(request.data)
            for index, region, offset, byte_size in inputs:
                data[index] = regions.part(SharedMemoryInput(region, offset, byte_size), owner)
            request.data = data
            if header.device_outputs:
                located = [(each.name, each.place) for each in header.outputs if each.place is not None]
                places = {name: regions.part(place, owner) for name, place in located}
                request.sink = regions.outputs(request.sink, places)
        except NeriteError as error:
            request.respond(InferenceResponse.failed(error.without_frames()))
            return False
        return True

    def _calls(self, count: int, body: memoryview) -> None:
        header, numbers, times, records, tokens = read_group(self._headers, body, timed=True)
        sink = self._sinks[count]
        requests = []
        for number, arrived_ns, data in zip(numbers, times, records, strict=True):
            request = FrontRequest(header, data, sink, arrived_ns)
            request.number = number
            self.calls[number] = request
            requests.append(request)
        for token in tokens:
            self._buffer_leases.returned(token)
        self.calls_begun += len(requests)
        self._submitting = True
        self._server.infer_all(requests)
        self._submitting = False

    def _cancel(self, number: int, why: CancelReason) -> None:
        request = self.calls.get(number)
        if request is not None:
            request.cancel(why)
        exchange = self.exchanges.pop(number, None)
        if exchange is not None:
            exchange.cancel(why)

    def _pause(self, number: int, paused: bool) -> None:
        request = self.calls.get(number)
        if request is not None:
            request.pause(paused)
        exchange = self.exchanges.get(number)
        if exchange is not None:
            exchange.pause(paused)

    def _buffers(self, body: memoryview) -> tuple[int, bytes, list[Buffer]]:
        """Return number, name and buffers of a RELAY message."""
        number, tokens, at = messages.read_batch(body)
        name_size, count, at = kinds.read_buffers_head(body, at)
        name, data, _ = self._headers.buffers(body, at, name_size, count)
        for token in tokens:
            self._buffer_leases.returned(token)
        return number, name, cast(list[Buffer], data)

    def _relay_http(self, secure: bool, body: memoryview) -> None:
        number, _, (head, content) = self._buffers(body)
        span, self._span = self._span, None
        handler = self._owner.http_handler
        exchange = self.exchanges[number] = RelayedExchange(
            self, number, self._heads.get(bytes(head)), handler, secure, span
        )
        exchange.run(memoryview(content))

    def not_loaded(self, model: str, error: NeriteError) -> None:
        """Have the front end the requests that wait for a model."""
        self._send(messages.json_frame(kinds.NOT_LOADED, [model, messages.error_json(error)]))

    def forget_heads(self) -> None:
        """Discard the routes of heads, because access rules have changed."""
        self._heads.clear()

    def ended(self, number: int) -> None:
        """Remove a relayed request that was answered."""
        self.exchanges.pop(number, None)

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        """Send a reply once all fronts know what has changed until now."""
        self._owner.after_acknowledgement(send)

    def publish(self) -> None:
        """Send what has changed to all fronts."""
        self._owner.publish()

    def _relay_grpc(self, body: memoryview) -> None:
        number, name, (content,) = self._buffers(body)
        path, _, owner = name.decode().partition("\0")
        changes = METHODS[path] in kinds.CHANGING

        def answer(result: Message | NeriteError) -> None:
            if isinstance(result, NeriteError):
                piece, data = RelayedPiece.ERROR, json.dumps(messages.error_json(result)).encode()
            else:
                piece, data = RelayedPiece.MESSAGE, result.SerializeToString()
            if changes:
                self.publish()
            self.after_acknowledgement(lambda: self.relayed(number, piece, [data]))

        self._owner.administer(path, owner, bytes(content), answer)

    # The end.

    def close(self) -> None:
        """Close the connection, and release the memory of both ends."""
        self._closed = True
        super().close()
        self._arena.close()
        while self._asked:
            _done(self._asked.popleft())

    def _lost(self) -> None:
        if self._server.demand is not None:
            self._server.demand.gone(self)
        calls, self.calls = self.calls, {}
        exchanges, self.exchanges = self.exchanges, {}
        for request in calls.values():
            request.cancel(CancelReason.DISCONNECTED)
        for exchange in exchanges.values():
            exchange.cancel(CancelReason.DISCONNECTED)
        self._owner.lost(self)

    def _kill(self, reason: str) -> None:
        self.process.kill(reason)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
