"""Watchdog of the event loop: a thread that logs the stacks of all threads when the loop is blocked.

Anything that blocks the loop blocks every connection: a model that sleeps in the server process, a lock, a slow disk.
The stacks show which it is. If something holds the GIL, the watchdog thread waits for it, gets it when that call
returns, and finds the thread still at that line.

``faulthandler.dump_traceback_later`` would not wait, but it reads the frames of threads that run: a process that was
suspended for long enough (SIGSTOP, a container without processor time) could end by SIGSEGV when it went on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from time import monotonic_ns

from nerite.scheduling.stall_detectors import LoopStallDetector, StallKind, StallReport

_log = logging.getLogger("nerite.execution")


class LoopWatchdog:
    """Watches the loop of the thread that creates it, at the cost of four short callbacks per ``seconds``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """``seconds``: how long the loop may be blocked without a log message."""
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._detector = LoopStallDetector(int(seconds * 1e9), monotonic_ns())
        self._stopped = threading.Event()
        self._heartbeat_pending = False
        """A heartbeat is scheduled on the loop and has not run yet."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog thread and wait for it."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        period = self._detector.period / 1e9
        while not self._stopped.is_set():
            if not self._heartbeat_pending:
                self._heartbeat_pending = True
                self._loop.call_soon_threadsafe(self._heartbeat)
            self._stopped.wait(period)
            report = self._detector.check(monotonic_ns())
            if report is not None:
                self._log_report(report)

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
                "the server process was stalled for %.1f s: something held the GIL, or the machine was too busy.%s "
                "Stacks of all threads at the end, the loop's first:\n%s",
                seconds,
                others,
                "\n".join(self._stacks_now()),
            )

    def _stacks_now(self) -> Iterator[str]:
        """Yield the stacks of all threads except this one, the loop's first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        for ident in sorted(frames, key=lambda ident: ident != self._loop_thread):
            if ident != self._thread.ident:
                yield f"thread '{names.get(ident, ident)}':"
                yield from (line.rstrip() for line in traceback.format_stack(frames[ident]))
