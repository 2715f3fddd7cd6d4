"""Connections to a member over HTTP/1.1: one request at a time on each, kept for the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, cast

from nerite.cluster.addresses import split_address
from nerite.core.failures import report, system_error
from nerite.core.tensor import Buffer
from nerite.router.member_tls import ClientTls, refusal_of
from nerite.router.response_body import ChunkScanner
from nerite.router.response_head import MAX_RESPONSE_HEAD, BadResponse, ResponseHead, ResponseHeads
from nerite.transports import tcp

MAX_CONNECTIONS: Final = 4096
"""Connections to one member; further requests wait for one."""
_MAX_IDLE_SECONDS: Final = 60.0
_MOST_INTERIM: Final = 100


class ResponseTaker(Protocol):
    """Takes the response to one request. Exactly one of ``take_whole``, ``take_end`` and ``take_loss`` comes last."""

    def take_whole(self, head: ResponseHead, load: bytes, body: Buffer) -> None:
        """Take a response that came in one piece. ``load`` is the load report in its head."""

    def take_head(self, head: ResponseHead, load: bytes) -> None:
        """Take the head of a response whose body follows."""

    def take_data(self, data: Buffer, scanner: ChunkScanner | None) -> None:
        """Take a part of the body; with ``scanner``, framed as chunks."""

    def take_end(self) -> None:
        """Take the end of the body."""

    def take_loss(self, cause: str, *, stale: bool) -> None:
        """Take note that the response will not be completed. ``cause`` continues a sentence about the member.

        ``stale``: a kept connection broke before any byte of the response, as when the member closes idle ones.
        """


class ConnectionWaiter(Protocol):
    """Who waits for a connection."""

    def connected(self, connection: MemberConnection) -> None:
        """Use a connection."""

    def unconnected(self, cause: str) -> None:
        """Take note that there is none. ``cause`` continues a sentence about the member."""


class MemberConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, owner: MemberConnections) -> None:
        self._owner = owner
        self._transport: asyncio.Transport
        self._taker: ResponseTaker | None = None
        self._bodiless = False
        self._interim = 0
        """Responses before that to the present request, such as 100 Continue."""
        self._stash = b""
        """Beginning of a head."""
        self._head: ResponseHead | None = None
        self._missing = 0
        self._scanner: ChunkScanner | None = None
        self.paused = False
        """The client does not read the response."""
        self.made = False
        """It was connected, so ``connection_lost`` will be called."""
        self._unread = b""
        """What is taken in the next turn of the loop, before anything else is read: it has very many chunks."""
        self.served = 0
        """Number of responses so far."""
        self.idle_since = 0.0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.made = True
        tcp.notice_lost_host(transport)
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def request(self, taker: ResponseTaker, parts: Sequence[Buffer], *, bodiless: bool = False) -> None:
        """Send a request. ``bodiless``: the response has no body, whatever its head says, as for HEAD."""
        self._taker = taker
        self._interim = 0
        self._bodiless = bodiless
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)

    def pause(self, paused: bool) -> None:
        """Stop reading the response, or go on: the client does not keep up (backpressure)."""
        if self.closed or paused == self.paused:
            return
        self.paused = paused
        if paused:
            self._transport.pause_reading()
        elif not self._unread:
            self._transport.resume_reading()

    def _take_later(self, data: bytes) -> None:
        """Take the rest of what was received in the next turn of the loop, so that others do not wait."""
        self._unread = data
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._take_unread)

    def _take_unread(self) -> None:
        data, self._unread = self._unread, b""
        if not self.closed:
            self.data_received(data)
        if not (self._unread or self.paused or self.closed):
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Close the connection: the response is no longer wanted. Nothing is reported afterwards."""
        self._taker = None
        self.close()

    def close(self) -> None:
        """Close the connection at once."""
        if not self.closed:
            self.closed = True
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take received bytes."""
        try:
            if self._unread:
                self._unread += data
            elif self._taker is None:  # nothing was asked
                self.close()
            elif self._head is None:
                self._take_beginning(self._taker, data)
            else:
                self._take_body(self._taker, data)
        except BadResponse as error:
            self._lose(str(error))
        except Exception as error:
            report("router", error, "in a connection to a member")
            self._lose("sent a response that the router failed to pass on")

    def _take_beginning(self, taker: ResponseTaker, data: bytes) -> None:
        if self._stash:
            data = self._stash + data
            self._stash = b""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if (end if end >= 4 else len(data)) > MAX_RESPONSE_HEAD:
                raise BadResponse(f"sent a head of more than {MAX_RESPONSE_HEAD} bytes")
            if end < 4:
                self._stash = data
                return
            head, load = self._owner.heads.get(data[:end])
            if not head.interim:
                break
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise BadResponse(f"sent more than {_MOST_INTERIM} interim responses")
            data = data[end:]
        if self._bodiless or not (head.content_length or head.chunked or head.closes):
            self._end(head, keeps=head.keeps and len(data) == end)
            taker.take_whole(head, load, b"")
        elif head.content_length and len(data) - end >= head.content_length:
            whole = len(data) - end == head.content_length
            self._end(head, keeps=head.keeps and whole)
            taker.take_whole(head, load, memoryview(data)[end : end + head.content_length])
        else:
            self._head = head
            self._missing = head.content_length
            self._scanner = ChunkScanner() if head.chunked else None
            taker.take_head(head, load)
            if len(data) > end and self._taker is taker:
                self._take_body(taker, data[end:])

    def _take_body(self, taker: ResponseTaker, data: bytes) -> None:
        head, scanner = self._head, self._scanner
        assert head is not None
        used = size = len(data)
        rest = b""
        if scanner is not None:
            used = scanner.feed(data)
            complete = scanner.complete
            rest = b"" if complete else data[used:]
        elif head.closes:
            complete = False
        else:
            used = min(size, self._missing)
            self._missing -= used
            complete = not self._missing
        if used < size:
            data = data[:used]
        taker.take_data(data, scanner)
        if rest and not self.closed:
            self._take_later(rest)
        elif complete and self._taker is taker:  # the client may have gone meanwhile
            self._end(head, keeps=head.keeps and used == size)
            taker.take_end()

    def _end(self, head: ResponseHead, *, keeps: bool) -> None:
        """Make the connection free for another request."""
        self._taker = self._head = self._scanner = None
        self.served += 1
        if not keeps:
            self.close()
        elif not self.closed:
            self.pause(False)
            self._owner.release(self)

    def _lose(self, cause: str) -> None:
        taker, self._taker = self._taker, None
        self.close()
        if taker is not None:
            taker.take_loss(cause, stale=False)

    def eof_received(self) -> bool:
        """Close: a member that stops sending has nothing more to say."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss of a response that was under way."""
        self.closed = True
        self._owner.lost(self)
        taker, self._taker = self._taker, None
        if taker is None:
            return
        if self._head is not None and self._head.closes and exc is None:
            taker.take_end()
            return
        stale = bool(self.served) and self._head is None and not self._stash
        if self._head is not None:
            cause = "closed the connection before the end of its answer"
        else:
            cause = "closed the connection without an answer"
        if isinstance(exc, OSError):
            cause += f" ({system_error(exc)})"
        taker.take_loss(cause, stale=stale)


class MemberConnections:
    """All connections to one member."""

    def __init__(
        self, address: str, heads: ResponseHeads, connect_timeout: float, tls: ClientTls | None = None
    ) -> None:
        """``tls`` None: the connections are plain."""
        self.address = address
        self._tls = tls
        self.heads = heads
        self.open = 0
        """Connections that are open or being opened."""
        self._place = split_address(address)
        self._connect_timeout = connect_timeout
        self._idle: list[MemberConnection] = []
        self._waiting: deque[ConnectionWaiter] = deque()
        self._opening = 0
        """Connections that are being opened."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired = False

    def acquire(self, waiter: ConnectionWaiter, *, fresh: bool = False) -> None:
        """Give ``waiter`` a connection: an idle one at once, or another when it is there. ``fresh``: a new one."""
        idle = self._idle
        while idle and not fresh:
            connection = idle.pop()
            if not connection.closed:
                waiter.connected(connection)
                return
        self._waiting.append(waiter)
        self._connect_waiting()

    def withdraw(self, waiter: ConnectionWaiter) -> None:
        """Forget a waiter."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def release(self, connection: MemberConnection) -> None:
        """Take back a connection whose response has ended."""
        if self._waiting:
            self._give(connection, self._waiting.popleft())
        elif self._retired:
            connection.close()
        else:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    def _give(self, connection: MemberConnection, waiter: ConnectionWaiter) -> None:
        """Have a waiter use a connection. Never raises: whoever had it before depends on that."""
        try:
            waiter.connected(connection)
        except Exception as error:
            failure = report("router", error, f"while a request to {self.address} was sent")
            connection.abandon()
            self._refuse(waiter, f"could not be asked: {failure.message}")

    def _refuse(self, waiter: ConnectionWaiter, cause: str) -> None:
        try:
            waiter.unconnected(cause)
        except Exception as error:  # the others that wait do not depend on it
            report("router", error, f"while a request to {self.address} was given up")

    def lost(self, connection: MemberConnection) -> None:
        """Note that a connection is closed."""
        self.open -= 1
        if connection in self._idle:
            self._idle.remove(connection)
        self._connect_waiting()

    def close_idle(self, now: float) -> None:
        """Close the connections that were not needed for a minute. ``now`` is the loop's time."""
        while self._idle and now - self._idle[0].idle_since > _MAX_IDLE_SECONDS:
            self._idle.pop(0).close()

    def retire(self) -> None:
        """Close idle connections now, and others when their responses have ended: the member has left its pool."""
        self._retired = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _connect_waiting(self) -> None:
        """Open a connection for everybody who waits, as far as there may be so many."""
        while self._opening < len(self._waiting) and self.open < MAX_CONNECTIONS:
            # A task for a new connection, not for a request: connections are kept.
            self.open += 1
            self._opening += 1
            task = asyncio.get_running_loop().create_task(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        host, port = self._place
        context, server_name = self._tls or (None, None)
        cause = ""
        connection = MemberConnection(self)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, port, ssl=context, server_hostname=server_name
                )
        except TimeoutError:
            cause = f"did not accept a connection within {self._connect_timeout:g} s"
        except OSError as error:
            cause = refusal_of(error)
        except Exception as error:
            failure = report("router", error, f"while a connection to {self.address} was opened")
            cause = f"cannot be reached: {failure.message}"
        finally:
            self._opening -= 1
            if not connection.made:
                self.open -= 1
        if not cause and not connection.closed:
            self.release(connection)
            return
        if connection.made:  # the time was over when the connection was there: ``lost`` counts it
            connection.close()
        if self._waiting:
            self._refuse(self._waiting.popleft(), cause or "closed a new connection")
        self._connect_waiting()
