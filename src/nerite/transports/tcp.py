"""What every port asks of the system's TCP."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final

from nerite.core.errors import Unavailable

_BACKLOG: Final = 4096

_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds of silence before the first probe, seconds between two, and how many go unanswered before the end."""


_REASONS: Final = {
    errno.EADDRINUSE: "already in use",
    errno.EACCES: "cannot be opened: ports below 1024 are for root, unless the system is told otherwise",
    errno.EADDRNOTAVAIL: "cannot be opened: the address has to be one of this machine, or 0.0.0.0 for all of them",
}


async def listen(
    service: str,
    connection: Callable[[], asyncio.BaseProtocol],
    address: str,
    port: int,
    *,
    reuse_port: bool,
    tls: ssl.SSLContext | None,
) -> asyncio.Server:
    """Open a port. Raises ``Unavailable``, with the name of the service, if it cannot be had."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(connection, address, port, reuse_port=reuse_port, backlog=_BACKLOG, ssl=tls)
    except OSError as error:
        raise Unavailable(
            f"failed to start {service} service: Unavailable - Socket '{address}:{port}' {_reason(error)}"
        ) from error
    _notice_dead_peers(server)
    return server


def _reason(error: OSError) -> str:
    """Return why a port cannot be had; in Triton's words if somebody has it."""
    if isinstance(error, socket.gaierror):
        return f"cannot be opened: the address has to be one of this machine ({error.strerror})"
    return _REASONS.get(error.errno or 0) or f"cannot be opened: {error.strerror or error}"


def _notice_dead_peers(server: asyncio.Server) -> None:
    """Have connections end whose peer vanished without a word (power, network): after two minutes of silence.

    Peers that are only slow answer the probes. What was sent and is not acknowledged is TCP's own business: it is sent
    again, and given up in the end. The options pass from a listening socket to what it accepts.
    """
    for listening in server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if hasattr(socket, name):  # not everywhere
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
