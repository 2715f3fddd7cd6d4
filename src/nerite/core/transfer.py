"""Progress of a download as text: size, rate and time left. A pure decider: it is given the time."""

from __future__ import annotations

from collections import deque
from typing import Final

EVERY: Final = 10.0
"""Seconds between two progress lines in the log."""
_WINDOW: Final = 15.0
"""Seconds over which the rate is measured, so that it follows the connection."""


class DownloadProgress:
    """Lines about the progress of a download."""

    def __init__(self, what: str, files: int, total: int, now: float, done: int = 0) -> None:
        """``done``: bytes that an earlier download has left, which do not count for the rate."""
        self._what = what
        self._files = files
        self._total = total
        self._began = now
        self._last_line = now
        self._kept = done
        self._samples = deque([(now, done)])
        self.done = done
        """Bytes received so far."""

    def start(self) -> str:
        """Return the first line."""
        kept = f", {readable_size(self._kept)} of it here already" if self._kept else ""
        files = f"{self._files} file{'s' * (self._files != 1)}"
        return f"downloading {self._what}: {files}, {readable_size(self._total)}{kept}"

    def line(self, now: float) -> str:
        """Return a progress line if one is due; else an empty text."""
        if now - self._last_line < EVERY:
            return ""
        self._last_line = now
        remark = self.remark(now)
        return f"downloading {self._what}: {readable_size(self.done)} of {readable_size(self._total)}" + (
            f", {remark}" if remark else ""
        )

    def remark(self, now: float) -> str:
        """Return the rate of the last seconds and the time left; empty in the first second."""
        self._samples.append((now, self.done))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        if now - began < 1:
            return ""
        rate = max(0.0, (self.done - before) / (now - began))
        if rate < 1:
            return "0 bytes a second"
        return f"{readable_size(int(rate))} a second, {readable_time((self._total - self.done) / rate)} left"

    def end(self, now: float) -> str:
        """Return the last line."""
        seconds, received = now - self._began, self.done - self._kept
        rate = f", {readable_size(int(received / seconds))} a second" if seconds >= 1 else ""
        return f"downloaded {self._what}: {readable_size(received)} in {seconds:.1f} s{rate}"


def readable_size(size: int) -> str:
    """Format a number of bytes with a decimal unit."""
    number, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{number:.1f} {unit}"


def readable_time(seconds: float) -> str:
    """Format a time in minutes and seconds, or hours and minutes: ``0:07``, ``12:30``, ``3 h 05 min``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
