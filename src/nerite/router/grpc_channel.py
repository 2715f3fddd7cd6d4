"""The channel to a member: connections are opened on demand, and calls wait for them."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import OrderedDict
from functools import partial
from typing import Final

from nerite.core.failures import report
from nerite.router.grpc_member import GrpcCallSink, GrpcMemberCall, GrpcMemberConnection, GrpcMemberSocket
from nerite.router.member_tls import ClientTls, refusal_of

MAX_CONNECTIONS: Final = 16
"""Connections to one member. Another is opened only while all have as many streams as the member allows."""


class GrpcChannel:
    """Connections to the gRPC port of one member."""

    def __init__(self, address: str, connect_timeout: float, tls: ClientTls | None = None) -> None:
        """``address`` is ``HOST:PORT``; empty if the member has no port for gRPC, which fails all calls.

        ``tls`` None: the connections are plain.
        """
        self.address = address
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._connections: list[GrpcMemberConnection] = []
        self._waiting: OrderedDict[GrpcMemberCall, None] = OrderedDict()
        """Calls that wait for a connection or for room on one, in their order."""
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False

    def start(self, block: bytes, sink: GrpcCallSink) -> GrpcMemberCall:
        """Begin a call with the headers in ``block``, now or as soon as a connection has room.

        ``sink`` is told later if that fails, never before this returns.
        """
        call = GrpcMemberCall(self, block, sink)
        self._waiting[call] = None
        if len(self._waiting) == 1:
            self.begin_waiting()
        return call

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def close(self) -> None:
        """Begin no more calls: the member has gone. Those under way go on."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self._fail_waiting("was removed from its pool")
        for connection in tuple(self._connections):
            connection.close()

    def abort(self, why: str) -> None:
        """Close at once: all calls are lost."""
        self.close()
        for connection in tuple(self._connections):
            connection.abort(why)

    def check(self) -> None:
        """Check all connections; call this every few seconds."""
        now = self._loop.time()
        for place, connection in enumerate(tuple(self._connections)):
            connection.check(now, spare=place > 0)

    # For connections and calls

    def withdraw(self, call: GrpcMemberCall) -> None:
        """Remove a call that waits for a connection."""
        self._waiting.pop(call, None)

    def begin_waiting(self) -> None:
        """Begin calls that wait, and open another connection if none has room for them."""
        for connection in self._connections:
            while self._waiting and connection.http2.room:
                call, _ = self._waiting.popitem(last=False)
                try:
                    call.begin(connection)
                except Exception as error:
                    failure = report("router", error, f"while a call to {self.address} began")
                    call.cancel()
                    self._loop.call_soon(partial(call.lose, f"could not be asked: {failure.message}", unprocessed=True))
        if self._waiting and self._connecting is None and len(self._connections) < MAX_CONNECTIONS:
            self._connecting = self._loop.create_task(self._connect())

    def connected(self, connection: GrpcMemberConnection) -> None:
        """Use a new connection."""
        self._connections.append(connection)
        self.begin_waiting()

    def disconnected(self, connection: GrpcMemberConnection) -> None:
        """Forget a connection, and replace it if calls wait."""
        if connection in self._connections:
            self._connections.remove(connection)
            if not self._closed:
                self.begin_waiting()

    async def _connect(self) -> None:
        host, _, port = self.address.rpartition(":")
        context, server_name = self._tls or (None, None)
        connection = GrpcMemberConnection(self, self._loop)
        why = ""
        try:
            if not port:
                raise OSError(errno.EADDRNOTAVAIL, "it has no gRPC port; set grpc-port of its pool in the cluster file")
            async with asyncio.timeout(self._connect_timeout):
                await self._loop.create_connection(
                    lambda: GrpcMemberSocket(connection),
                    host.strip("[]"),
                    int(port),
                    ssl=context,
                    server_hostname=server_name,
                )
                await connection.ready
        except TimeoutError:
            why = f"did not accept a connection to {self.address} within {self._connect_timeout:g} s"
        except ssl.SSLError as error:
            why = refusal_of(error)
        except OSError as error:
            why = f"cannot be reached at {self.address or 'any address'}: {error.strerror or error}"
        except Exception as error:
            failure = report("router", error, f"while a connection to {self.address} was opened")
            why = f"cannot be reached at {self.address}: {failure.message}"
        finally:
            self._connecting = None
            connection.ready.cancel()
            if connection not in self._connections:
                connection.abort(why)
        if not why:
            self.begin_waiting()
        elif not self._connections:
            self._fail_waiting(why)

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, OrderedDict()
        for call in waiting:
            call.lose(why, unprocessed=True)
