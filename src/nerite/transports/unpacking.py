"""Decompression of what clients send: never more than a limit, and long ones in steps.

Each step releases the interpreter's lock, so that a thread that unpacks does not hold up the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from nerite.core.errors import NeriteError
from nerite.core.failures import Where, report

SMALL: Final = 64 * 1024
"""What unpacks to no more than this is unpacked on the event loop: it takes less than 0.2 ms."""
_STEP: Final = 1024 * 1024
_PIECE: Final = 64 * 1024
"""Bytes of packed data that the decoder is given at once: it copies what it has not used."""


class UnpackedTooLarge(Exception):
    """The data unpacks to more than the limit."""


class BrokenContent(Exception):
    """The data is not what its coding says; the text says why."""


def unpack(packed: memoryview, window: int, limit: int, take: Callable[[int], None] | None = None) -> memoryview:
    """Return writable plain data of at most ``limit`` bytes. ``window`` is zlib's number for the coding.

    ``take`` is told of bytes before there is memory for them; what it raises ends the work. Raises ``UnpackedTooLarge``
    or ``BrokenContent``.
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
                    raise UnpackedTooLarge
                if take is not None:
                    take(len(step))
                plain += step
                rest = decoder.unconsumed_tail
                more = len(step) == wanted  # the decoder itself may hold more, when nothing is left of its input
            if decoder.eof:
                break
    except zlib.error as error:
        raise BrokenContent(str(error)) from None
    if not decoder.eof:
        raise BrokenContent("it is incomplete")
    return memoryview(plain)


def unpack_small(packed: memoryview, window: int, limit: int) -> memoryview | None:
    """Return plain data as ``unpack`` does, or None if it is more than a little.

    Raises ``UnpackedTooLarge`` or ``BrokenContent``.
    """
    if len(packed) > SMALL:
        return None
    try:
        return unpack(packed, window, min(limit, SMALL))
    except UnpackedTooLarge:
        if limit <= SMALL:
            raise
        return None


# Work on large requests that would hold up the event loop: done in a few threads, continued on the loop.

T = TypeVar("T")
_THREADS: Final = 2
"""More would take the interpreter's lock from the loop more often."""


class BackgroundWork(Protocol):
    """Where such work is done."""

    def run(self, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]) -> None:
        """Do ``work``, and call ``then`` with its result, or what it raises, on the event loop that runs now.

        ``where`` it is reported in what was not foreseen.
        """

    def close(self) -> None:
        """Begin no more work."""


class BackgroundThreads:
    """The threads of a server."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "aside")

    def run(self, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]) -> None:
        """Do ``work`` in a thread, as soon as one is free."""
        self._pool.submit(_work, asyncio.get_running_loop(), where, work, then)

    def close(self) -> None:
        """Begin no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _work(
    loop: asyncio.AbstractEventLoop, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(then, result_of(where, work))


def result_of(where: Where, work: Callable[[], T]) -> T | NeriteError:
    """Return the result of ``work``, or the error that it raises.

    An error is returned without its stack: the request would stay in the frames of that until the next collection.
    """
    try:
        return work()
    except NeriteError as error:
        return error.without_frames()
    except Exception as error:
        return report(where, error, "in a large request")
