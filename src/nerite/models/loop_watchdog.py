"""Watches the event loop from a thread of its own, and says in the log where everybody is when it stands still.

Whatever blocks the loop blocks every connection: a model that sleeps in the server's process, a lock, a slow disk. The
stacks of all threads tell which it is. Where something holds the interpreter, this thread cannot run either; then a
thread of ``faulthandler``, which needs no interpreter, has written them down.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Final

from nerite.core.memory import memory_file
from nerite.scheduling.stall_detectors import LoopStallDetector, News, What

_log = logging.getLogger("nerite.execution")
_now = time.monotonic_ns
_MOST_BYTES: Final = 64 * 1024
"""Of stacks that are written down without the interpreter."""


class LoopWatchdog:
    """Over the loop that it is made on. Costs it four short calls in the time that it may stand still."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """``seconds``: how long the loop may stand still."""
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._seconds = seconds
        self._watch = LoopStallDetector(int(seconds * 1e9), _now())
        self._stopped = threading.Event()
        self._waits = False
        """The loop was asked, and has not answered."""
        self._stacks = memory_file()
        """For ``faulthandler``."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()
        os.close(self._stacks)

    def _run(self) -> None:
        period = self._watch.period / 1e9
        while not self._stopped.is_set():
            faulthandler.dump_traceback_later(period + self._seconds, file=self._stacks)
            if not self._waits:
                self._waits = True
                self._loop.call_soon_threadsafe(self._answer)
            self._stopped.wait(period)
            news = self._watch.look(_now())
            if news is not None:
                self._tell(news)
            os.ftruncate(self._stacks, 0)
            os.lseek(self._stacks, 0, os.SEEK_SET)
        faulthandler.cancel_dump_traceback_later()

    def _answer(self) -> None:
        self._watch.answered(_now())
        self._waits = False

    def _tell(self, news: News) -> None:
        seconds = news.nanoseconds / 1e9
        others = f" There were {news.untold} more such moments before it." if news.untold else ""
        if news.what is What.WENT_ON:
            _log.warning("the event loop goes on, after %.1f s", seconds)
        elif news.what is What.STANDS:
            _log.error(
                "the event loop has stood still for %.1f s, and with it all connections.%s Its thread comes first:\n%s",
                seconds,
                others,
                "\n".join(self._stacks_now()),
            )
        else:
            _log.error(
                "the server stood still for %.1f s: something held the interpreter, or the machine was too busy.%s\n%s",
                seconds,
                others,
                os.pread(self._stacks, _MOST_BYTES, 0).decode(errors="replace").rstrip(),
            )

    def _stacks_now(self) -> Iterator[str]:
        """Yield the stack of each thread but this one, that of the loop first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        for ident in sorted(frames, key=lambda ident: ident != self._loop_thread):
            if ident != self._thread.ident:
                yield f"thread '{names.get(ident, ident)}':"
                yield from (line.rstrip() for line in traceback.format_stack(frames[ident]))
