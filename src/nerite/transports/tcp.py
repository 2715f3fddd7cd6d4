"""TCP and TLS sockets of all ports: listening, accepting connections within the limits, keepalive, and TLS contexts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from nerite.config.options import TlsOptions
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.transports.limits import TransportLimits

# TLS: certificates and protocol negotiation.


def tls_context(options: TlsOptions, protocols: Sequence[str]) -> ssl.SSLContext | None:
    """Return the TLS context of a port that speaks ``protocols``; None if TLS is disabled.

    Raises ``InvalidArgument`` for a file that cannot be read or is not a certificate or key.
    """
    if not options.enabled:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    file = options.server_cert
    try:
        context.load_cert_chain(options.server_cert, options.server_key or None)
        if options.mutual:
            file = options.root_cert
            context.load_verify_locations(options.root_cert)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"cannot use the certificate '{file}': {error}") from error
    return context


# Owner of a port that is already in use: the process that listens on it, if the system reveals it.

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
"""State of a listening socket in the kernel's tables."""


class PortOwner(NamedTuple):
    """Process that listens on a port."""

    pid: int
    command: str


def port_in_use_text(port: int) -> str:
    """Return who uses a port, as the continuation of "in use"."""
    owner = owner_of(port)
    return " by a process of another user or container" if owner is None else f" by {owner.command} (pid {owner.pid})"


def owner_of(port: int, proc: Path = _PROC) -> PortOwner | None:
    """Return the process that listens on a port, if it can be determined."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    links = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir() if links else ():
        if folder.name.isdecimal():
            try:
                if any(os.readlink(each) in links for each in (folder / "fd").iterdir()):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    return PortOwner(int(folder.name), " ".join(os.fsdecode(word) for word in words[:4] if word))
            except OSError:  # another user's process, or one that has ended
                continue
    return None


def _listening(table: Path, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]


_BACKLOG: Final = 4096
_HANDSHAKE_TIMEOUT: Final = 10.0
"""Timeout of a TLS handshake in seconds."""
_ACCEPT_BATCH: Final = 64
"""Maximum number of connections accepted in Python in one turn of the loop."""
_ACCEPT_PAUSE: Final = 0.1
"""Pause after the system ran out of file descriptors or memory for a connection, in seconds."""
_TAKE_PAUSE: Final = 0.01
"""Pause after an accepted connection could not be passed on, in seconds."""
_LINGER: Final = 1.0
"""Seconds that a refused connection stays open: if closed at once, its client might not see the refusal."""
_MAX_LINGERING: Final = 64
"""Maximum number of such connections at a time; lower if the connection limit is low."""

_KEEPALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""TCP keepalive: seconds of silence before the first probe, interval of probes, and number of unanswered probes."""

_LOST_HOST_OPTIONS: Final = (
    ("TCP_KEEPIDLE", 5),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 2),
    ("TCP_USER_TIMEOUT", 15_000),
)
"""The same for connections to members, and the milliseconds for which data may remain unacknowledged."""

_ATTACH_FILTER: Final = 26
"""SO_ATTACH_FILTER of Linux."""
_DROP_SYN_FILTER: Final = b"".join(
    struct.pack("@HBBI", *step)
    for step in (
        (0x30, 0, 0, 13),  # load the byte with the TCP flags
        (0x45, 0, 1, 0x02),  # is it a SYN, which begins a connection?
        (0x06, 0, 0, 0),  # then drop it
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""BPF program that drops SYN segments, so that no connection begins."""

_REASONS: Final = {
    errno.EADDRINUSE: "already in use",
    errno.EACCES: "cannot be opened: ports below 1024 require root privileges or a system setting",
    errno.EADDRNOTAVAIL: "cannot be opened: the address must be one of this machine, or 0.0.0.0 for all addresses",
}

_Connect: TypeAlias = Callable[[], asyncio.BaseProtocol]


class TcpPort(Protocol):
    """An open port."""

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Listening sockets."""

    def close(self) -> None:
        """Stop accepting connections."""


async def listen(
    service: str,
    connection: _Connect,
    address: str,
    port: int,
    *,
    bounds: TransportLimits,
    refusal: bytes,
    reuse_port: bool,
    tls: ssl.SSLContext | None,
) -> tuple[TcpPort, int]:
    """Open a port; return it and its number. Raises ``Unavailable`` with the service's name on failure.

    A connection adds itself to the table of ``bounds`` when it is made, and removes itself when it is lost. ``refusal``
    is sent to clients over the connection limit, unless TLS is used.
    """
    loop = asyncio.get_running_loop()

    def accepted() -> asyncio.BaseProtocol:
        return connection() if _admitted(bounds) else _RefusedConnection(refusal, bounds.connections.limit)

    if tls is not None:
        # It accepts connections itself, so that slow handshakes count as connections from the start.
        secured = _AcceptedConnections(connection, bounds, tls)

        def secure(client: socket.socket) -> bool:
            if _admitted(bounds):
                secured.start(client)
            else:
                client.close()
            return True

        accepting = await AcceptingPort.open(service, address, port, secure, reuse_port=reuse_port)
        return accepting, accepting.number
    try:
        server = await loop.create_server(accepted, address, port, reuse_port=reuse_port, backlog=_BACKLOG)
    except OSError as error:
        raise _unavailable(service, address, port, error) from error
    for listening in server.sockets:
        _notice_dead_peers(listening)
    return server, server.sockets[0].getsockname()[1]


async def check(service: str, address: str, port: int, *, reuse_port: bool) -> None:
    """Raise like ``listen`` if a port is unavailable now. The port stays closed."""
    try:
        for family, place in await _bind_addresses(address, port):
            socket.create_server(place, family=family, reuse_port=reuse_port).close()
    except OSError as error:
        raise _unavailable(service, address, port, error) from error


async def _bind_addresses(address: str, port: int) -> Iterable[tuple[int, Any]]:
    """Resolve ``address`` to the family and bind address of each socket."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((family, place) for family, _, _, _, place in found)


def _unavailable(service: str, address: str, port: int, error: OSError) -> Unavailable:
    text = f"failed to start {service} service: Unavailable - Socket '{address}:{port}' {_reason(error)}"
    return Unavailable(text + (port_in_use_text(port) if error.errno == errno.EADDRINUSE else ""))


def _admitted(bounds: TransportLimits) -> bool:
    """Return whether one more connection is allowed; an idle one is closed to make room if necessary."""
    return not bounds.connections.full or _made_room(bounds)


def _made_room(bounds: TransportLimits) -> bool:
    """Close an idle connection; count a refused one and return False if there is none."""
    idle = bounds.connections.make_room(time.monotonic())
    if idle is None:
        bounds.closed["refused"] += 1
        return False
    bounds.closed["displaced"] += 1
    idle.retire()
    return True


class _RefusedConnection(asyncio.Protocol):
    """Connection over the limit. Its input is dropped."""

    lingering = 0

    def __init__(self, refusal: bytes, connections: int) -> None:
        self._refusal = refusal
        self._max_lingering = min(max(connections // 8, 4), _MAX_LINGERING)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the refusal, unless too many refused connections are open already."""
        client = cast(asyncio.Transport, transport)
        if _RefusedConnection.lingering >= self._max_lingering:
            client.abort()
            return
        _RefusedConnection.lingering += 1
        client.write(self._refusal)
        client.write_eof()
        asyncio.get_running_loop().call_later(_LINGER, self._end, client)

    def _end(self, transport: asyncio.Transport) -> None:
        _RefusedConnection.lingering -= 1
        transport.abort()


class _BeginningConnection:
    """Table entry of an accepted connection until its protocol begins. During a TLS handshake it is never idle."""

    served = 0

    def __init__(self, busy: bool) -> None:
        self.busy = busy
        self.retired = False

    def retire(self) -> None:
        """Have it closed instead of begun."""
        self.retired = True

    def drain(self) -> None:
        """Do nothing: a handshake has no requests."""


class _AcceptedConnections:
    """Hands accepted sockets to their protocol. A TLS handshake counts as a connection from its start."""

    def __init__(
        self,
        connection: _Connect,
        bounds: TransportLimits,
        tls: ssl.SSLContext | None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """``failed`` is called when a connection ends before its protocol has begun."""
        self._loop = asyncio.get_running_loop()
        self._failed = failed
        self._connection = connection
        self._bounds = bounds
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, accepted: socket.socket) -> None:
        """Begin a connection."""
        beginning = _BeginningConnection(busy=self._tls is not None)
        self._bounds.connections.add(beginning, time.monotonic())
        self._run(self._begin(accepted, beginning))

    def refuse(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        """Have ``protocol`` refuse a connection."""
        self._run(self._connect(accepted, lambda: protocol))
        self._failed()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, accepted: socket.socket, beginning: _BeginningConnection) -> None:
        """Pass the connection to its protocol, unless it is retired before."""
        transport: asyncio.Transport | None = None
        try:
            if beginning.retired:
                accepted.close()
            else:
                transport = await self._connect(accepted, self._connection)
        finally:
            self._bounds.connections.remove(beginning)
            if transport is None:
                self._failed()
        if transport is not None and beginning.retired:
            transport.abort()

    async def _connect(self, accepted: socket.socket, connection: _Connect) -> asyncio.Transport | None:
        """Perform the TLS handshake, if any, and pass the connection to its protocol. Return None if that failed."""
        accepted.setblocking(False)
        timeout = None if self._tls is None else _HANDSHAKE_TIMEOUT
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                connection, accepted, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except OSError:  # the client disconnected, does not speak TLS, or has no valid certificate
            return None
        return transport


class AdoptedPort:
    """Port whose connections another process accepts and hands over."""

    sockets: Sequence[socket.socket] = ()

    def __init__(
        self,
        connection: _Connect,
        bounds: TransportLimits,
        refusal: bytes,
        tls: ssl.SSLContext | None,
        closed: Callable[[], None],
    ) -> None:
        """``refusal`` is sent to clients over the connection limit, unless TLS is used.

        ``closed`` is called when a connection ends that is refused, or whose protocol has not begun.
        """
        self._closed = closed
        self._bounds = bounds
        self._refusal = refusal
        self._tls = tls
        self._accepted = _AcceptedConnections(connection, bounds, tls, closed)

    def adopt(self, accepted: socket.socket, limit: int = 0) -> None:
        """Take over a connection. If the limit of connections is reached, ``limit`` is that limit."""
        if not limit or _made_room(self._bounds):
            self._accepted.start(accepted)
        elif self._tls is None:
            self._accepted.refuse(accepted, _RefusedConnection(self._refusal, limit))
        else:
            accepted.close()
            self._closed()

    def close(self) -> None:
        """Do nothing: the other process stops accepting."""


class AcceptingPort:
    """Port that accepts connections in Python and passes on their sockets."""

    def __init__(self, sockets: list[socket.socket], take: Callable[[socket.socket], bool]) -> None:
        """``take`` returns False if it cannot take a socket yet; the port then offers it again."""
        self.number: int = sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self.sockets = sockets
        self._take = take
        self._pause_timer: asyncio.TimerHandle | None = None
        self._held: socket.socket | None = None
        """Accepted connection that could not be passed on yet. Others wait in the backlog meanwhile."""
        self._resume_accepting()

    @classmethod
    async def open(
        cls, service: str, address: str, port: int, take: Callable[[socket.socket], bool], *, reuse_port: bool
    ) -> AcceptingPort:
        """Listen, and call ``take`` with each accepted socket. Raises ``Unavailable`` with the service's name.

        ``take`` returns False for a socket that cannot be taken yet; it is called again after a pause.
        """
        sockets: list[socket.socket] = []
        try:
            for family, place in await _bind_addresses(address, port):
                sockets.append(socket.create_server(place, family=family, backlog=_BACKLOG, reuse_port=reuse_port))
                sockets[-1].setblocking(False)
                _notice_dead_peers(sockets[-1])
        except OSError as error:
            for listening in sockets:
                listening.close()
            raise _unavailable(service, address, port, error) from error
        return cls(sockets, take)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        if self._held is not None:
            self._held.close()

    def _resume_accepting(self) -> None:
        if self._held is not None:
            if not self._take(self._held):
                self._pause(_TAKE_PAUSE)
                return
            self._held = None
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self, seconds: float) -> None:
        for listening in self.sockets:
            self._loop.remove_reader(listening)
        self._pause_timer = self._loop.call_later(seconds, self._resume_accepting)

    def _accept(self, listening: socket.socket) -> None:
        """Accept pending connections in batches, so that open connections get their turn."""
        for _ in range(_ACCEPT_BATCH):
            try:
                accepted, _peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of file descriptors or memory: retrying at once would fail the same way
                self._pause(_ACCEPT_PAUSE)
                return
            if not self._take(accepted):
                self._held = accepted
                self._pause(_TAKE_PAUSE)
                return


def admit_no_more(sockets: Iterable[socket.socket]) -> None:
    """Let no more connections begin, so that none is lost in the backlog when the sockets are closed.

    Connections already begun can still be accepted. Clients retry after a second, and are refused then. Linux only.
    """
    if sys.platform == "linux":
        steps = ctypes.create_string_buffer(_DROP_SYN_FILTER, len(_DROP_SYN_FILTER))
        program = struct.pack("@HP", len(_DROP_SYN_FILTER) // 8, ctypes.addressof(steps))
        for listening in sockets:
            with contextlib.suppress(OSError):  # it may not be permitted
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _reason(error: OSError) -> str:
    """Return why a port is unavailable; in Triton's words if it is in use."""
    if isinstance(error, socket.gaierror):
        return f"cannot be opened: the address must be one of this machine ({error.strerror})"
    return _REASONS.get(error.errno or 0) or f"cannot be opened: {error.strerror or error}"


def _notice_dead_peers(listening: socket.socket) -> None:
    """Close connections whose peer vanished silently (power, network) after two minutes without traffic.

    Slow peers answer the probes. Sent data without acknowledgement is up to TCP: it is retransmitted, and eventually
    given up. Accepted sockets inherit the options from the listening socket.
    """
    _keep_alive(listening.setsockopt)


def notice_lost_host(transport: asyncio.BaseTransport) -> None:
    """Close a connection that we opened within 15 s after its host has vanished, so that others get its requests.

    A peer that takes nothing for so long while data wait for it counts as vanished, too.
    """
    _keep_alive(transport.get_extra_info("socket").setsockopt, _LOST_HOST_OPTIONS)


def _keep_alive(
    set_option: Callable[[int, int, int], None], options: Sequence[tuple[str, int]] = _KEEPALIVE_OPTIONS
) -> None:
    set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # not on every system
            set_option(socket.IPPROTO_TCP, getattr(socket, name), value)
