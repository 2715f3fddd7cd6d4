"""What every port asks of the system's TCP: to listen, and to have no more connections than there may be."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from nerite.config.options import TlsOptions
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.transports.limits import TransportLimits

# TLS for a port: certificates and what is negotiated.


def tls_context(options: TlsOptions, protocols: Sequence[str]) -> ssl.SSLContext | None:
    """Return the context of a port that speaks ``protocols``, None where TLS is off.

    Raises ``InvalidArgument`` for a file that cannot be read or is no certificate or key.
    """
    if not options.enabled:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
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


# Who has a port that cannot be had: the process that listens there, as far as the system tells.

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
"""The state of a socket that listens, as the kernel writes it."""


class PortOwner(NamedTuple):
    """A process."""

    pid: int
    command: str


def port_in_use_text(port: int) -> str:
    """Return who has a port, as it goes on after "in use"."""
    owner = owner_of(port)
    return " by a process of another user or container" if owner is None else f" by {owner.command} (pid {owner.pid})"


def owner_of(port: int, proc: Path = _PROC) -> PortOwner | None:
    """Return the process that listens on a port, if it may be known."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    links = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir() if links else ():
        if folder.name.isdecimal():
            try:
                if any(os.readlink(each) in links for each in (folder / "fd").iterdir()):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    return PortOwner(int(folder.name), " ".join(os.fsdecode(word) for word in words[:4] if word))
            except OSError:  # somebody else's, or gone meanwhile
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
_HANDSHAKE: Final = 10.0
"""Seconds that a TLS handshake may take."""
_TOGETHER: Final = 64
"""TLS connections that are accepted in one turn of the loop."""
_REST: Final = 0.1
"""Seconds without accepting after the system had no descriptor or no memory for a connection."""
_LINGER: Final = 1.0
"""Seconds for which a refused connection stays open: closed at once, its client might not see the refusal."""
_MOST_LINGERING: Final = 64
"""Connections that do so at once, at most; fewer where few connections are allowed."""

_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds of silence before the first probe, seconds between two, and how many go unanswered before the end."""


_ATTACH_FILTER: Final = 26
"""Linux's SO_ATTACH_FILTER."""
_NO_SYN: Final = b"".join(
    struct.pack("@HBBI", *step)
    for step in (
        (0x30, 0, 0, 13),  # load the byte with the flags of the segment
        (0x45, 0, 1, 0x02),  # does it begin a connection?
        (0x06, 0, 0, 0),  # then drop it
        (0x06, 0, 0, 0xFFFFFFFF),
    )
)
"""A socket filter that lets no connection begin."""

_REASONS: Final = {
    errno.EADDRINUSE: "already in use",
    errno.EACCES: "cannot be opened: ports below 1024 are for root, unless the system is told otherwise",
    errno.EADDRNOTAVAIL: "cannot be opened: the address has to be one of this machine, or 0.0.0.0 for all of them",
}

_Connect: TypeAlias = Callable[[], asyncio.BaseProtocol]


class TcpPort(Protocol):
    """A port that is open."""

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Those that listen."""

    def close(self) -> None:
        """Accept no more connections."""


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
    """Open a port; return it and its number. Raises ``Unavailable``, with the service's name, if it cannot be had.

    A connection adds itself to the table of ``bounds`` when it is made, and removes itself when it is lost. ``refusal``
    is what a client is told for which there is no room, where there is no TLS.
    """
    loop = asyncio.get_running_loop()

    def accepted() -> asyncio.BaseProtocol:
        return connection() if _admitted(bounds) else _Refused(refusal, bounds.connections.limit)

    try:
        if tls is not None:
            secured = await _TlsPort.open(connection, address, port, bounds, tls, reuse_port=reuse_port)
            return secured, secured.number
        server = await loop.create_server(accepted, address, port, reuse_port=reuse_port, backlog=_BACKLOG)
    except OSError as error:
        raise _refused(service, address, port, error) from error
    for listening in server.sockets:
        _notice_dead_peers(listening)
    return server, server.sockets[0].getsockname()[1]


async def check(service: str, address: str, port: int, *, reuse_port: bool) -> None:
    """Raise as ``listen`` for a port that cannot be had now. It stays closed."""
    try:
        for family, place in await _places(address, port):
            socket.create_server(place, family=family, reuse_port=reuse_port).close()
    except OSError as error:
        raise _refused(service, address, port, error) from error


async def _places(address: str, port: int) -> Iterable[tuple[int, Any]]:
    """Return where to listen for ``address``: the family of each socket, and what it is bound to."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((family, place) for family, _, _, _, place in found)


def _refused(service: str, address: str, port: int, error: OSError) -> Unavailable:
    said = f"failed to start {service} service: Unavailable - Socket '{address}:{port}' {_reason(error)}"
    return Unavailable(said + (port_in_use_text(port) if error.errno == errno.EADDRINUSE else ""))


def _admitted(bounds: TransportLimits) -> bool:
    """Return whether there is room for one more connection, which an idle one may have to make."""
    table = bounds.connections
    if table.full:
        idle = table.make_room(time.monotonic())
        if idle is None:
            bounds.closed["refused"] += 1
            return False
        bounds.closed["displaced"] += 1
        idle.retire()
    return True


class _Refused(asyncio.Protocol):
    """A connection for which there is no room. What its client sends is dropped."""

    lingering = 0

    def __init__(self, refusal: bytes, connections: int) -> None:
        self._refusal = refusal
        self._most = min(max(connections // 8, 4), _MOST_LINGERING)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the client, if not too many have been told just now."""
        told = cast(asyncio.Transport, transport)
        if _Refused.lingering >= self._most:
            told.abort()
            return
        _Refused.lingering += 1
        told.write(self._refusal)
        told.write_eof()
        asyncio.get_running_loop().call_later(_LINGER, self._end, told)

    def _end(self, transport: asyncio.Transport) -> None:
        _Refused.lingering -= 1
        transport.abort()


class _Handshake:
    """A connection whose TLS handshake is under way, as the table sees it."""

    busy = True
    served = 0

    def retire(self) -> None:
        """Do nothing: it is never idle."""


class _TlsPort:
    """A port with TLS. It accepts by itself: handshakes take long, and count as connections from their beginning."""

    def __init__(
        self, sockets: list[socket.socket], connection: _Connect, bounds: TransportLimits, tls: ssl.SSLContext
    ) -> None:
        self.number: int = sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self.sockets = sockets
        self._connection = connection
        self._bounds = bounds
        self._tls = tls
        self._handshakes: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._go_on()

    @classmethod
    async def open(
        cls,
        connection: _Connect,
        address: str,
        port: int,
        bounds: TransportLimits,
        tls: ssl.SSLContext,
        *,
        reuse_port: bool,
    ) -> _TlsPort:
        """Listen. Raises ``OSError`` if the port cannot be had."""
        sockets: list[socket.socket] = []
        try:
            for family, place in await _places(address, port):
                sockets.append(socket.create_server(place, family=family, backlog=_BACKLOG, reuse_port=reuse_port))
                sockets[-1].setblocking(False)
                _notice_dead_peers(sockets[-1])
        except OSError:
            for listening in sockets:
                listening.close()
            raise
        return cls(sockets, connection, bounds, tls)

    def close(self) -> None:
        """Accept no more connections."""
        if self._rest is not None:
            self._rest.cancel()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()

    def _go_on(self) -> None:
        for listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept what waits: not all of it at once, so that connections that are open have their turn."""
        for _ in range(_TOGETHER):
            try:
                accepted, _peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory: the system would say the same again and again
                for each in self.sockets:
                    self._loop.remove_reader(each)
                self._rest = self._loop.call_later(_REST, self._go_on)
                return
            if not _admitted(self._bounds):
                accepted.close()
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._shake_hands(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        """Hand a connection over to its protocol."""
        table = self._bounds.connections
        handshake = _Handshake()
        table.add(handshake, time.monotonic())
        try:
            await self._loop.connect_accepted_socket(
                self._connection, accepted, ssl=self._tls, ssl_handshake_timeout=_HANDSHAKE
            )
        except OSError:  # the client went, or does not speak TLS, or shows no certificate that is taken
            pass
        finally:
            table.remove(handshake)


def admit_no_more(sockets: Iterable[socket.socket]) -> None:
    """Have no more connections begin at these, so that none is begun and not accepted when they are closed.

    Those that are begun can still be accepted. Clients try again after a second, and are refused then. Linux only.
    """
    if sys.platform == "linux":
        steps = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
        program = struct.pack("@HP", len(_NO_SYN) // 8, ctypes.addressof(steps))
        for listening in sockets:
            with contextlib.suppress(OSError):  # it may not be allowed
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _reason(error: OSError) -> str:
    """Return why a port cannot be had; in Triton's words if somebody has it."""
    if isinstance(error, socket.gaierror):
        return f"cannot be opened: the address has to be one of this machine ({error.strerror})"
    return _REASONS.get(error.errno or 0) or f"cannot be opened: {error.strerror or error}"


def _notice_dead_peers(listening: socket.socket) -> None:
    """Have connections end whose peer vanished without a word (power, network): after two minutes of silence.

    Peers that are only slow answer the probes. What was sent and is not acknowledged is TCP's own business: it is sent
    again, and given up in the end. The options pass from a listening socket to what it accepts.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if hasattr(socket, name):  # not everywhere
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
