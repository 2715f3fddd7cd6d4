"""The gRPC port: maintains its connections, and writes their access log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nerite.config.options import KeepaliveOptions
from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.tensor import Buffer
from nerite.http2 import Limits, RequestHeaders, refusal_preface
from nerite.transports.access_log import AccessRecord, peer_of
from nerite.transports.grpc import messages
from nerite.transports.grpc.call import ConnectionCall
from nerite.transports.grpc.connection import CallService, CallTarget, GrpcCall, GrpcConnection, GrpcShared
from nerite.transports.grpc.keepalive import KeepaliveRules
from nerite.transports.grpc.stream import StreamCall, StreamTarget
from nerite.transports.limits import CHECKS, TransportLimits
from nerite.transports.tcp_listener import TcpListener

# Variants of connection and calls that write the access log.


class LoggedCall(GrpcCall):
    """Unary call that writes an access log line."""

    __slots__ = ("_access",)

    def __init__(self, connection: GrpcConnection, stream_id: int, target: CallTarget) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Handle a piece of the request body."""
        self._access.received += len(data)
        super().receive(data, end)

    def reply(self, head: bytes, parts: Sequence[Buffer], load: bytes = b"") -> None:
        """Send the reply message with status OK."""
        self._note(messages.status_name(messages.TRAILERS_OK), sum(map(len, parts)))
        super().reply(head, parts, load)

    def fail(self, block: bytes) -> None:
        """Send the status of a failed call."""
        self._note(messages.status_name(block))
        super().fail(block)

    def cancel(self, why: CancelReason) -> None:
        """Discard the call and cancel its inference: the client no longer waits."""
        self._note(messages.NAMES[messages.CANCELLED])
        super().cancel(why)

    def _note(self, status: str, sent: int = 0) -> None:
        self._access.asks(self.request)
        self._access.answered(status, sent)


class LoggedStreamCall(StreamCall):
    """Stream that writes one access log line at its end."""

    __slots__ = ("_access", "_request_count", "_response_count", "_sent")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: StreamTarget) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning
        self._request_count = self._response_count = self._sent = 0

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Handle a piece of the request body."""
        self._access.received += len(data)
        super().receive(data, end)

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Record a request that is in progress."""
        self._request_count += 1
        super().begin(request, decoupled)

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Report why a message was rejected."""
        self._request_count += 1
        super().refuse(request_id, error)

    def cancel(self, why: CancelReason) -> None:
        """Discard the call and cancel its requests: the client no longer waits."""
        self._note(messages.CANCELLED)
        super().cancel(why)

    def _send(self, parts: Sequence[Buffer]) -> None:
        if parts:
            self._response_count += 1
            self._sent += sum(map(len, parts))
        super()._send(parts)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        self._note(code)
        super()._finish(code, message, retry_after)

    def _note(self, code: int) -> None:
        self._access.answered(
            messages.NAMES[code], self._sent, requests=self._request_count, responses=self._response_count
        )


class LoggedGrpcConnection(GrpcConnection):
    """Connection that writes an access log line for each call."""

    _unary = LoggedCall
    _streaming = LoggedStreamCall
    beginning: AccessRecord
    """Access record of the call that is being created."""

    def _begin(self, stream_id: int, headers: RequestHeaders) -> ConnectionCall | None:
        self.beginning = AccessRecord(peer_of(self._transport))
        self.beginning.method, self.beginning.path = "gRPC", headers.path.decode("latin-1")
        call = super()._begin(stream_id, headers)
        if call is None:
            target: CallTarget | None = headers.memo
            refusal = target.refusal if target is not None else None
            self.beginning.answered(messages.status_name(refusal) if refusal is not None else "INTERNAL")
        return call


class GrpcListener(TcpListener[GrpcShared]):
    """Accepts gRPC connections on a port."""

    def __init__(
        self,
        service: CallService,
        keepalive: KeepaliveOptions,
        bounds: TransportLimits,
        upload_seconds: float,
        *,
        access_log: bool = False,
        connection: type[GrpcConnection] | None = None,
    ) -> None:
        """``upload_seconds`` limits how long an arriving message may make no progress; 0 is no limit.

        ``connection`` is another class of connections, which write no access log.
        """
        limits = Limits(
            min_recv_ping_interval_without_data_ms=keepalive.min_recv_ping_interval_without_data_ms,
            max_ping_strikes=keepalive.max_ping_strikes,
            permit_pings_without_calls=keepalive.permit_without_calls,
        )
        shared = GrpcShared(service, limits, KeepaliveRules(keepalive), bounds)
        every = shared.rules.check_interval
        refusal = refusal_preface(limits, f"the limit of open connections ({bounds.connections_setting}) is reached")
        super().__init__("GRPC", shared, refusal, min(every, upload_seconds / CHECKS) if upload_seconds else every)
        self._connection = connection or (LoggedGrpcConnection if access_log else GrpcConnection)
        self._upload_seconds = upload_seconds

    def _connect(self) -> GrpcConnection:
        return self._connection(self._shared, asyncio.get_running_loop())

    def _check(self, now: float) -> None:
        """Check keepalive and age, and messages that arrive too slowly."""
        seconds = self._shared.bounds.patience(self._upload_seconds)
        for connection in tuple(self._shared.connections):
            connection.check(now)
            if seconds:
                connection.check_uploads(now, seconds)

    def forget(self) -> None:
        """Re-evaluate all headers, also on open connections, because access rules have changed."""
        for connection in self._shared.connections:
            connection.http2.forget_headers()
