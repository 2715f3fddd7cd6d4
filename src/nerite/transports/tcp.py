"""What every port asks of the system's TCP."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds of silence before the first probe, seconds between two, and how many go unanswered before the end."""


def notice_dead_peers(server: asyncio.Server) -> None:
    """Have connections end whose peer vanished without a word (power, network): after two minutes of silence.

    Peers that are only slow answer the probes. What was sent and is not acknowledged is TCP's own business: it is sent
    again, and given up in the end. The options pass from a listening socket to what it accepts.
    """
    for listening in server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if hasattr(socket, name):  # not everywhere
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
