"""Tells the log how a long download goes. A pure decider: it is told the time."""

from __future__ import annotations

EVERY = 10.0
"""Seconds between two lines."""


class Progress:
    """One for the download of a model."""

    def __init__(self, what: str, files: int, total: int, now: float) -> None:
        self._what = what
        self._files = files
        self._total = total
        self._began = now
        self._told = now
        self.done = 0
        """Bytes that have come."""

    def start(self) -> str:
        """Return the first line."""
        return f"downloading {self._what}: {self._files} file{'s' * (self._files != 1)}, {readable(self._total)}"

    def line(self, now: float) -> str:
        """Return a line if it is time for one; else nothing."""
        if now - self._told < EVERY:
            return ""
        self._told = now
        return f"downloading {self._what}: {readable(self.done)} of {readable(self._total)}{self._rate(now)}"

    def end(self, now: float) -> str:
        """Return the last line."""
        return f"downloaded {self._what}: {readable(self.done)} in {now - self._began:.1f} s{self._rate(now)}"

    def _rate(self, now: float) -> str:
        seconds = now - self._began
        return f", {readable(int(self.done / seconds))} a second" if seconds >= 1 else ""


def readable(size: int) -> str:
    """Return a number of bytes as people say it."""
    number, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
