"""The gRPC port of the router, and its channels to the members."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Final

from nerite.balancing.member import Member, RoutedRequest
from nerite.cluster.settings import RouterSettings
from nerite.config.options import KeepaliveOptions
from nerite.core.failures import report
from nerite.http2 import RequestHeaders
from nerite.router.accounting import RouterLedger
from nerite.router.admission import AdmissionRequest, RouterAdmission
from nerite.router.exchange import RoutedExchange
from nerite.router.external_scaler import ActivityFeed, ActivityStream, ExternalScaler
from nerite.router.grpc_calls import RoutedCall, RoutedStream
from nerite.router.grpc_channel import GrpcChannel
from nerite.router.grpc_member import GrpcCallSink, GrpcMemberCall
from nerite.router.grpc_relay import CallRelay, RoutedTarget
from nerite.router.grpc_service import GrpcRouterService
from nerite.router.http_members import HttpMembers
from nerite.router.member_tls import GRPC, MemberContexts
from nerite.router.pools import PoolTable, RouterPool
from nerite.router.scaling import RouterScaling
from nerite.transports.access_log import AccessRecord, peer_of
from nerite.transports.grpc import messages
from nerite.transports.grpc.call import ConnectionCall, StreamingCall
from nerite.transports.grpc.connection import GrpcConnection
from nerite.transports.grpc.listener import GrpcListener
from nerite.transports.limits import TransportLimits

_CHECK_INTERVAL: Final = 5.0
_UPLOAD_SECONDS: Final = 60.0
"""Seconds in which a message that arrives must make progress."""


class RoutedGrpcConnection(GrpcConnection):
    """A client's connection, whose calls go to members; those of an autoscaler are answered here."""

    _unary = RoutedCall

    def _stream_call(self, stream_id: int, stream: Any) -> StreamingCall:
        kind = ActivityStream if isinstance(stream, ActivityFeed) else RoutedStream
        return kind(self, stream_id, stream)


class LoggedRoutedGrpcConnection(RoutedGrpcConnection):
    """A client's connection that writes an access log line for each call."""

    def _begin(self, stream_id: int, headers: RequestHeaders) -> ConnectionCall | None:
        access = AccessRecord(peer_of(self._transport))
        access.method, access.path = "gRPC", headers.path.decode("latin-1")
        call = super()._begin(stream_id, headers)
        if isinstance(call, RoutedCall | RoutedStream):
            call.access = access
        elif headers.memo is not None and headers.memo.refusal is not None:
            access.answered(messages.status_name(headers.memo.refusal))
        return call


class RouterGrpcPort:
    """Accepts the calls of clients, and sends them to members."""

    def __init__(
        self,
        table: PoolTable,
        members: HttpMembers,
        settings: RouterSettings,
        session_headers: Sequence[str],
        bounds: TransportLimits,
        scaling: RouterScaling | None = None,
        admission: RouterAdmission | None = None,
        contexts: MemberContexts | None = None,
        member_key: str = "",
    ) -> None:
        """``contexts`` are those of members that speak TLS; ``member_key`` is what members know the router by."""
        self._admission = admission
        self.ledger: RouterLedger | None = None
        """Where each request gets a row; to be set before ``open``."""
        self._table = table
        self._members = members
        self._settings = settings
        self._contexts = contexts or MemberContexts((), GRPC)
        self._channels: dict[tuple[str, str], GrpcChannel] = {}
        """By address, and by whose settings of TLS they use."""
        self._check_timer: asyncio.TimerHandle | None = None
        self._service = GrpcRouterService(
            self,
            table,
            session_headers,
            settings.max_body,
            None if admission is None else admission.callers,
            None if scaling is None else ExternalScaler(scaling).target,
            member_key,
        )
        self._listener = GrpcListener(
            self._service,
            KeepaliveOptions(),
            bounds,
            _UPLOAD_SECONDS,
            connection=LoggedRoutedGrpcConnection if settings.access_log else RoutedGrpcConnection,
        )

    async def open(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port number. Raises ``Unavailable``."""
        number = await self._listener.open(address, port, tls=tls)
        self._check()
        return number

    def forget(self) -> None:
        """Read the headers of calls anew, because tenants have changed."""
        self._listener.forget()

    def drain(self) -> None:
        """Have clients send further calls elsewhere."""
        self._service.draining = True
        self._listener.drain()

    def admit_no_more(self) -> None:
        """Let no more connections begin."""
        self._listener.admit_no_more()

    def stop_accepting(self) -> None:
        """Close the port, and each connection as soon as it is idle."""
        self._listener.stop_accepting()

    def abort(self) -> None:
        """Close all connections at once."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._listener.abort()
        for channel in self._channels.values():
            channel.abort("was given up: the router stops")

    @property
    def open_connections(self) -> int:
        """Number of clients' connections."""
        return self._listener.open_connections

    # For the calls

    @property
    def accounts(self) -> bool:
        """Whether calls are admitted or billed by the model of their first message."""
        return self._admission is not None or self.ledger is not None

    def exchange(
        self, client: CallRelay, request: RoutedRequest, target: RoutedTarget, size: int, timeout: float
    ) -> RoutedExchange:
        """Return the exchange of a request, which has not begun. ``timeout`` is the client's, 0 for none."""
        own = self._settings.timeout
        seconds = min(timeout, own) if timeout and own else timeout or own
        caller = target.caller
        exchange = RoutedExchange(
            self._table,
            client,
            request,
            level=target.level,
            attempts=self._settings.attempts,
            timeout=seconds,
            gate=self._admission,
            asks=None if caller is None else AdmissionRequest(caller, request.model, False, size),
            waits=target.waits,
        )
        if self.ledger is not None and caller is not None:
            exchange.account = self.ledger.open(caller.tenant, request, monotonic_ns(), tokens=not target.single)
        return exchange

    def call(self, member: Member, block: bytes, sink: GrpcCallSink) -> GrpcMemberCall:
        """Begin a call at a member."""
        key = (member.grpc, member.tls)
        channel = self._channels.get(key)
        if channel is None:
            tls = self._contexts.of(member, member.grpc)
            channel = self._channels[key] = GrpcChannel(member.grpc, self._settings.connect_timeout, tls)
        return channel.start(block, sink)

    def suspect(self, pool: RouterPool, member: Member, cause: str) -> None:
        """Take a member out until its health has been checked: it could not be reached."""
        if member.grpc:
            self._members.suspect(pool, member, cause)

    def _check(self) -> None:
        """Check the channels every few seconds, and close those to members that are gone."""
        members = [load.member for pool in self._table.pools for load in pool.balancer.members]
        keys = {(member.grpc, member.tls) for member in members}
        self._check_timer = asyncio.get_running_loop().call_later(_CHECK_INTERVAL, self._check)
        for key, channel in tuple(self._channels.items()):
            try:
                if key in keys:
                    channel.check()
                else:
                    del self._channels[key]
                    channel.close()
            except Exception as error:
                report("router", error, f"while the connections to {channel.address} were checked")
