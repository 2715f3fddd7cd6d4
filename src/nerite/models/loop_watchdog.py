"""Watchdog of the event loop: a thread that logs the stacks of all threads when the loop is blocked.

Anything that blocks the loop blocks every connection: a model that sleeps in the server process, a lock, a slow disk.
The stacks show which it is. If something holds the GIL, the watchdog thread cannot run either; then a thread of
``faulthandler``, which does not need the GIL, has dumped the stacks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from time import monotonic_ns
from typing import Final

from nerite.core.memory import memory_file
from nerite.scheduling.stall_detectors import LoopStallDetector, StallKind, StallReport

_log = logging.getLogger("nerite.execution")
_MAX_BYTES: Final = 64 * 1024
"""Maximum number of bytes read from the stacks that ``faulthandler`` dumped."""


class LoopWatchdog:
    """Watches the loop of the thread that creates it, at the cost of four short callbacks per ``seconds``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """``seconds``: how long the loop may be blocked without a log message."""
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._seconds = seconds
        self._detector = LoopStallDetector(int(seconds * 1e9), monotonic_ns())
        self._stopped = threading.Event()
        self._heartbeat_pending = False
        """A heartbeat is scheduled on the loop and has not run yet."""
        self._stacks = memory_file()
        """File descriptor of the memfd that ``faulthandler`` dumps stacks to."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog thread and wait for it."""
        self._stopped.set()
        self._thread.join()
        os.close(self._stacks)

    def _run(self) -> None:
        period = self._detector.period / 1e9
        while not self._stopped.is_set():
            faulthandler.dump_traceback_later(period + self._seconds, file=self._stacks)
            if not self._heartbeat_pending:
                self._heartbeat_pending = True
                self._loop.call_soon_threadsafe(self._heartbeat)
            self._stopped.wait(period)
            report = self._detector.check(monotonic_ns())
            if report is not None:
                self._log_report(report)
            os.ftruncate(self._stacks, 0)
            os.lseek(self._stacks, 0, os.SEEK_SET)
        faulthandler.cancel_dump_traceback_later()

    def _heartbeat(self) -> None:
        self._detector.answered(monotonic_ns())
        self._heartbeat_pending = False

    def _log_report(self, report: StallReport) -> None:
        seconds = report.nanoseconds / 1e9
        others = f" {report.untold} earlier stalls were not logged." if report.untold else ""
        if report.kind is StallKind.ENDED:
            _log.warning("the event loop is running again after %.1f s", seconds)
        elif report.kind is StallKind.BLOCKED:
            _log.error(
                "the event loop has been blocked for %.1f s, and with it all connections.%s Stacks of all threads, the "
                "loop's first:\n%s",
                seconds,
                others,
                "\n".join(self._stacks_now()),
            )
        else:
            _log.error(
                "the server process was stalled for %.1f s: something held the GIL, or the machine was too busy.%s\n%s",
                seconds,
                others,
                os.pread(self._stacks, _MAX_BYTES, 0).decode(errors="replace").rstrip(),
            )

    def _stacks_now(self) -> Iterator[str]:
        """Yield the stacks of all threads except this one, the loop's first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        for ident in sorted(frames, key=lambda ident: ident != self._loop_thread):
            if ident != self._thread.ident:
                yield f"thread '{names.get(ident, ident)}':"
                yield from (line.rstrip() for line in traceback.format_stack(frames[ident]))
