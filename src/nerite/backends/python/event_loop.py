"""The event loop of one instance, for models whose methods are ``async``.

One loop for the life of the instance, running in a thread of its own all the time: what a model starts there and does
not wait for (a task, a connection pool) goes on between two batches. Both are made when the first coroutine comes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class EventLoop:
    """Runs coroutines, from whichever thread asks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Return what ``coroutine`` returns; raise what it raises, with no frames but its own.

        Raises ``TimeoutError`` when it takes longer than ``timeout`` seconds; it is cancelled then.
        """
        future = asyncio.run_coroutine_threadsafe(_settled(coroutine), self._started())
        try:
            value, error = future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
        if error is not None:
            raise error
        return value

    def start(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``coroutine`` beside others; pass what it returns or raises to ``ended``, in the loop's thread."""

        async def run() -> None:
            ended(*await _settled(coroutine))

        asyncio.run_coroutine_threadsafe(run(), self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._work, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def close(self) -> None:
        """Cancel what still runs and end the thread. Does nothing if no coroutine ever came."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = None

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):  # a task may have stopped the loop itself
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _settled(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error
