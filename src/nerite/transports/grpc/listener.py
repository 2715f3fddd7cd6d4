"""The gRPC port: opening it, and closing it in good order."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

from nerite.config.options import KeepaliveOptions
from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.tensor import Buffer
from nerite.http2 import Limits, RequestHeaders, refusal_preface
from nerite.transports import tcp
from nerite.transports.access_log import AccessRecord, peer_of
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallService, CallTarget, GrpcCall, GrpcConnection, GrpcShared
from nerite.transports.grpc.keepalive import KeepaliveRules
from nerite.transports.grpc.stream import StreamCall, StreamTarget
from nerite.transports.limits import LOOKS, TransportLimits

# A gRPC connection whose calls stand in the access log.


class LoggedCall(GrpcCall):
    """A unary call."""

    __slots__ = ("_access",)

    def __init__(self, connection: GrpcConnection, stream_id: int, target: CallTarget) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body."""
        self._access.received += len(data)
        super().receive(data, end)

    def reply(self, head: bytes, parts: Sequence[Buffer]) -> None:
        """Send the message of the reply, and OK."""
        self._note(messages.told(messages.TRAILERS_OK), sum(map(len, parts)))
        super().reply(head, parts)

    def fail(self, block: bytes) -> None:
        """Send the status of a call that failed."""
        self._note(messages.told(block))
        super().fail(block)

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: nobody waits for its answer."""
        self._note(messages.NAMES[messages.CANCELLED])
        super().cancel(why)

    def _note(self, told: str, sent: int = 0) -> None:
        self._access.asks(self.request)
        self._access.answered(told, sent)


class LoggedStreamCall(StreamCall):
    """A stream: one line at its end."""

    __slots__ = ("_access", "_asked", "_sent", "_told")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: StreamTarget) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning
        self._asked = self._told = self._sent = 0

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body."""
        self._access.received += len(data)
        super().receive(data, end)

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Note that a request is under way."""
        self._asked += 1
        super().begin(request, decoupled)

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Say why a message leads to no inference."""
        self._asked += 1
        super().refuse(request_id, error)

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: nobody waits for its responses."""
        self._note(messages.CANCELLED)
        super().cancel(why)

    def _send(self, parts: Sequence[Buffer]) -> None:
        if parts:
            self._told += 1
            self._sent += sum(map(len, parts))
        super()._send(parts)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        self._note(code)
        super()._finish(code, message, retry_after)

    def _note(self, code: int) -> None:
        self._access.answered(messages.NAMES[code], self._sent, requests=self._asked, responses=self._told)


class LoggedGrpcConnection(GrpcConnection):
    """Gives each call its line."""

    _unary = LoggedCall
    _streaming = LoggedStreamCall
    beginning: AccessRecord
    """Of the call that is being begun."""

    def _begin(self, stream_id: int, headers: RequestHeaders) -> GrpcCall | StreamCall | None:
        self.beginning = AccessRecord(peer_of(self._transport))
        self.beginning.method, self.beginning.path = "gRPC", headers.path.decode("latin-1")
        call = super()._begin(stream_id, headers)
        if call is None:
            target: CallTarget | None = headers.memo
            refusal = target.refusal if target is not None else None
            self.beginning.answered(messages.told(refusal) if refusal is not None else "INTERNAL")
        return call


_FULL = "as many connections are open as --max-connections allows"


class GrpcListener:
    """Accepts connections and knows those that are open."""

    def __init__(
        self,
        service: CallService,
        keepalive: KeepaliveOptions,
        bounds: TransportLimits,
        upload_seconds: float,
        *,
        access_log: bool = False,
    ) -> None:
        """``upload_seconds``: how long a message may arrive without coming on; 0 for any time."""
        self._connection = LoggedGrpcConnection if access_log else GrpcConnection
        limits = Limits(
            min_recv_ping_interval_without_data_ms=keepalive.min_recv_ping_interval_without_data_ms,
            max_ping_strikes=keepalive.max_ping_strikes,
            permit_pings_without_calls=keepalive.permit_without_calls,
        )
        self._shared = GrpcShared(service, limits, KeepaliveRules(keepalive), bounds)
        self._upload_seconds = upload_seconds
        every = self._shared.rules.look_every
        self._look_every = min(every, upload_seconds / LOOKS) if upload_seconds else every
        self._port: tcp.TcpPort | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen; return the port, which matters if 0 was asked for. Raises ``Unavailable`` if it cannot be had."""
        loop = asyncio.get_running_loop()
        self._port, number = await tcp.listen(
            "GRPC",
            lambda: self._connection(self._shared, loop),
            address,
            port,
            bounds=self._shared.bounds,
            refusal=refusal_preface(self._shared.limits, _FULL),
            reuse_port=reuse_port,
            tls=tls,
        )
        self._look()
        return number

    def _look(self) -> None:
        """Look after silent and old connections, and messages that arrive slowly, all of them, every now and then."""
        loop = asyncio.get_running_loop()
        seconds = self._shared.bounds.patience(self._upload_seconds)
        for connection in tuple(self._shared.connections):
            connection.look(loop.time())
            if seconds:
                connection.look_at_arrivals(loop.time(), seconds)
        self._look_timer = loop.call_later(self._look_every, self._look)

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""
        for connection in self._shared.connections:
            connection.http2.forget_headers()

    def drain(self) -> None:
        """Have every client know that its connection ends soon, so that it sends its next calls elsewhere."""
        for connection in tuple(self._shared.connections):
            connection.drain()

    def admit_no_more(self) -> None:
        """Have no more connections begin; those that have begun are accepted."""
        if self._port is not None:
            tcp.admit_no_more(self._port.sockets)

    def stop_accepting(self) -> None:
        """Close the port, and every connection as soon as it has nothing under way."""
        if self._port is not None:
            self._port.close()
        for connection in tuple(self._shared.connections):
            connection.shut_down()

    def abort(self) -> None:
        """Close what is left, at once."""
        if self._look_timer is not None:
            self._look_timer.cancel()
        for connection in tuple(self._shared.connections):
            connection.abort()

    @property
    def open_connections(self) -> int:
        """Connections that are open."""
        return len(self._shared.connections)
