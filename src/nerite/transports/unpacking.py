"""Decompresses request bodies within a size limit, and runs large ones in background threads.

Long data is decompressed in steps that release the GIL, so that a thread does not block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from nerite.core.errors import NeriteError
from nerite.core.failures import Where, report

SMALL: Final = 64 * 1024
"""Unpacked size up to which data is unpacked on the event loop: it takes less than 0.2 ms."""
_STEP_BYTES: Final = 1024 * 1024
_INPUT_BYTES: Final = 64 * 1024
"""Bytes passed to the decoder at once: it copies input that it has not consumed."""


class UnpackedTooLarge(Exception):
    """The unpacked data exceeds the limit."""


class BrokenContent(Exception):
    """The data does not match its encoding; the text says why."""


def unpacked(packed: memoryview, window: int, limit: int, *, alone: bool) -> Iterator[bytes]:
    """Yield at most ``limit`` bytes of unpacked data in pieces. ``window`` is zlib's ``wbits``.

    ``alone``: nothing may follow, where other parsers might go on reading; otherwise it is ignored. Raises
    ``UnpackedTooLarge`` or ``BrokenContent``.
    """
    decoder = zlib.decompressobj(window)
    left = limit
    try:
        for at in range(0, len(packed), _INPUT_BYTES):
            rest: memoryview | bytes = packed[at : at + _INPUT_BYTES]
            more = True
            while more and not decoder.eof:
                # Requesting one byte over the limit shows whether the data is too large.
                wanted = min(_STEP_BYTES, left + 1)
                step = decoder.decompress(rest, wanted)
                left -= len(step)
                if left < 0:
                    raise UnpackedTooLarge
                yield step
                rest = decoder.unconsumed_tail
                more = len(step) == wanted  # the decoder may hold more output after consuming its input
            if decoder.eof:
                if alone and (decoder.unused_data or at + _INPUT_BYTES < len(packed)):
                    raise BrokenContent("something follows its end")
                return
    except zlib.error as error:
        raise BrokenContent(str(error)) from None
    raise BrokenContent("it is incomplete")


def unpack(
    packed: memoryview, window: int, limit: int, take: Callable[[int], None] | None = None, *, alone: bool = False
) -> memoryview:
    """Return at most ``limit`` bytes of unpacked, writable data, which ``unpacked`` describes.

    ``take`` reserves bytes before they are stored; an exception that it raises ends the work.
    """
    plain = bytearray()
    for step in unpacked(packed, window, limit, alone=alone):
        if take is not None:
            take(len(step))
        plain += step
    return memoryview(plain)


def unpack_small(packed: memoryview, window: int, limit: int, *, alone: bool = False) -> memoryview | None:
    """Unpack like ``unpack``, or return None if the data is not small.

    Raises ``UnpackedTooLarge`` or ``BrokenContent``.
    """
    if len(packed) > SMALL:
        return None
    try:
        return unpack(packed, window, min(limit, SMALL), alone=alone)
    except UnpackedTooLarge:
        if limit <= SMALL:
            raise
        return None


# Background work on large requests, which would block the event loop; its results return to the loop.

T = TypeVar("T")
_THREADS: Final = 2
"""More threads would compete with the event loop for the GIL."""


class ThreadedWork(Protocol):
    """Runs work off the event loop."""

    def run(self, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]) -> None:
        """Run ``work``, and call ``then`` on the current event loop with its result or exception.

        Unforeseen exceptions are reported with ``where``.
        """

    def close(self) -> None:
        """Start no more work."""


class BackgroundThreads:
    """Background threads of a server."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "aside")

    def run(self, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]) -> None:
        """Run ``work`` as soon as a thread is free."""
        self._pool.submit(_run_and_post, asyncio.get_running_loop(), where, work, then)

    def close(self) -> None:
        """Start no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run_and_post(
    loop: asyncio.AbstractEventLoop, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(then, result_of(where, work))


def result_of(where: Where, work: Callable[[], T]) -> T | NeriteError:
    """Return the result of ``work``, or the error that it raises.

    The error is returned without its traceback, whose frames would keep the request alive until the next garbage
    collection.
    """
    try:
        return work()
    except NeriteError as error:
        return error.without_frames()
    except Exception as error:
        return report(where, error, "in a large request")
