"""Messages between an engine and the process of its pipeline: each is one piece of bytes, sent with one call.

What is sent after a step delays the next one, in a process that finds nothing in the caches: what Python's own
connections do with a message took as long there as all else between two steps.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any, Final

_LENGTH: Final = struct.Struct("<I")
_AT_ONCE: Final = 1 << 16
"""Bytes that are read with one call, at most."""


def packed(message: object) -> bytes:
    """Return a message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Line:
    """One end of it. One thread at a time sends, and one reads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._coming = select.poll()
        self._coming.register(end, select.POLLIN)

    def send(self, message: object) -> None:
        """Send what can be pickled. Raises ``OSError`` if nobody reads any more."""
        self.write(packed(message))

    def write(self, data: bytes) -> None:
        """Send what ``packed`` made, or the rest of it. Raises ``OSError`` if nobody reads any more."""
        self._socket.sendall(data)

    def push(self, data: bytes) -> bytes:
        """Send as much as there is room for now, and return the rest. Raises ``OSError`` if nobody reads any more."""
        try:
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises ``EOFError`` when there is none any more, and ``OSError``."""
        received = self._received
        while (end := self._end()) is None:
            more = self._socket.recv(_AT_ONCE)
            if not more:
                raise EOFError
            received += more
        message = pickle.loads(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return message

    def waits(self, milliseconds: int | None) -> bool:
        """Return whether a message, or a part of one, is there by then; None: whenever that is."""
        return bool(self._received or self._coming.poll(milliseconds))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _end(self) -> int | None:
        """Return where the first message ends, if it is there."""
        if len(self._received) < _LENGTH.size:
            return None
        end: int = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        return end if end <= len(self._received) else None
