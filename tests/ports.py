"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import os
import random
import socket

FIRST, LAST = 12000, 32000
"""Below the range from which the kernel takes the ports of outgoing connections: those of other tests would occupy a
port between its choice and the start of its server."""
_random = random.Random(os.getpid())


def free_ports(count: int) -> list[int]:
    """Return distinct ports on which nothing listens."""
    found: set[int] = set()
    while len(found) < count:
        port = _random.randrange(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.add(port)
    return list(found)
