"""Descriptors that come over a socket, also where this process may have no more open than it has."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import Final

_SPARES: Final = 8
_FOR_EACH: Final = 2
"""One is the descriptor's own, one is that which Python keeps of what it maps."""

_DESCRIPTOR: Final = struct.Struct("i")

_spares: list[int] = []
"""Descriptors of nothing, whose places others take."""


def keep_spares() -> None:
    """Have some to spare, as far as that is possible now. For the loop's thread, as ``received``."""
    with contextlib.suppress(OSError):
        while len(_spares) < _SPARES:
            _spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def received(line: socket.socket) -> int:
    """Return the descriptor that comes next, to be mapped. Raises ``OSError`` if there is no place for it.

    ``keep_spares`` is to follow: a mapping may have had to take the place of some.
    """
    while True:
        exhausted = not _spares
        for spare in _spares[-_FOR_EACH:]:
            os.close(spare)
        del _spares[-_FOR_EACH:]
        # What there is no place for is lost, unless it was only looked at.
        # (``socket.recv_fds`` leaves flags out.)
        _, found, _, _ = line.recvmsg(1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_PEEK)
        if found:
            line.recv(1)
            descriptor: int = _DESCRIPTOR.unpack(found[0][2])[0]
            return descriptor
        if exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
