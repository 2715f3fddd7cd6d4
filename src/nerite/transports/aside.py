"""Work on large requests that would hold up the event loop: done in a few threads, continued on the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from nerite.core.errors import NeriteError
from nerite.core.internal_errors import Where, report

T = TypeVar("T")
_THREADS: Final = 2
"""More would take the interpreter's lock from the loop more often."""


class Aside(Protocol):
    """Where such work is done."""

    def run(self, where: Where, work: Callable[[], T], then: Callable[[T | NeriteError], None]) -> None:
        """Do ``work``, and call ``then`` with its result, or what it raises, on the event loop that runs now.

        ``where`` it is reported in what was not foreseen.
        """

    def close(self) -> None:
        """Begin no more work."""


class Threads:
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
