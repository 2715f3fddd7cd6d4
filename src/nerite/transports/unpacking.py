"""Decompression of what clients send: never more than a limit, and long ones in steps.

Each step releases the interpreter's lock, so that a thread that unpacks does not hold up the event loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

SMALL: Final = 64 * 1024
"""What unpacks to no more than this is unpacked on the event loop: it takes less than 0.2 ms."""
_STEP: Final = 1024 * 1024
_PIECE: Final = 64 * 1024
"""Bytes of packed data that the decoder is given at once: it copies what it has not used."""


class TooLarge(Exception):
    """The data unpacks to more than the limit."""


class Broken(Exception):
    """The data is not what its coding says; the text says why."""


def unpack(packed: memoryview, window: int, limit: int, take: Callable[[int], None] | None = None) -> memoryview:
    """Return writable plain data of at most ``limit`` bytes. ``window`` is zlib's number for the coding.

    ``take`` is told of bytes before there is memory for them; what it raises ends the work. Raises ``TooLarge`` or
    ``Broken``.
    """
    decoder = zlib.decompressobj(window)
    plain = bytearray()
    try:
        for at in range(0, len(packed), _PIECE):
            rest: memoryview | bytes = packed[at : at + _PIECE]
            more = True
            while more and not decoder.eof:
                # One byte more than there is room for tells whether the data is too large.
                wanted = min(_STEP, limit - len(plain) + 1)
                step = decoder.decompress(rest, wanted)
                if len(plain) + len(step) > limit:
                    raise TooLarge
                if take is not None:
                    take(len(step))
                plain += step
                rest = decoder.unconsumed_tail
                more = len(step) == wanted  # the decoder itself may hold more, when nothing is left of its input
            if decoder.eof:
                break
    except zlib.error as error:
        raise Broken(str(error)) from None
    if not decoder.eof:
        raise Broken("it is incomplete")
    return memoryview(plain)


def unpack_small(packed: memoryview, window: int, limit: int) -> memoryview | None:
    """Return plain data as ``unpack`` does, or None if it is more than a little. Raises ``TooLarge`` or ``Broken``."""
    if len(packed) > SMALL:
        return None
    try:
        return unpack(packed, window, min(limit, SMALL))
    except TooLarge:
        if limit <= SMALL:
            raise
        return None
