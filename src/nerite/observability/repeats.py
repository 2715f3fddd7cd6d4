"""Lines that repeat themselves: the first are written as they come, and then there is one now and then, with a count.

A model that fails a thousand times a second says the same a thousand times a second. That fills disks, and hides what
else is said. Pure: told each line and the time, asked for what is to be said when it is due.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from nerite.observability.record import Record

AT_ONCE: Final = 10
"""Equal lines that are written within ``SECOND``."""
SECOND: Final = 1_000_000_000
WHILE: Final = 10 * SECOND
"""How often there is a line with a count, while it goes on."""
_MOST_LINES: Final = 1000
"""Different ones that are watched. What comes beyond is written."""
_MOST_IDS: Final = 8


class _Line:
    """One that was written, and comes again perhaps."""

    __slots__ = ("began", "held", "ids", "last", "until", "written")

    def __init__(self, now: int) -> None:
        self.began = now
        self.until = now + SECOND
        self.written = 0
        self.held = 0
        """As many were not written since ``began``."""
        self.last: Record
        """Of those."""
        self.ids: list[str] = []
        """Of the requests that they were about, the first few."""


class Repeats:
    """Those of one log."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def admits(self, record: Record, now: int) -> bool:
        """Return whether a line is to be written now; if not, it will be among those that ``due`` counts."""
        # Messages may be long, and quote what clients send.
        text = record.message
        key = (record.level, record.file, record.line, len(text), hash(text), record.extras.get("instance"))
        line = self._lines.get(key)
        if line is not None and line.until <= now and not line.held:
            del self._lines[key]
            line = None
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._forget(now)
                if len(self._lines) >= _MOST_LINES:
                    return True
            line = self._lines[key] = _Line(now)
        if line.written < AT_ONCE:
            line.written += 1
            return True
        line.held += 1
        line.last = record
        request_id = record.extras.get("request_id")
        if request_id and len(line.ids) < _MOST_IDS:
            line.ids.append(str(request_id))
        return False

    def next_time(self) -> int | None:
        """Return when to ask ``due``; None while there is nothing to be said."""
        return min((line.until for line in self._lines.values() if line.held), default=None)

    def due(self, now: int) -> list[Record]:
        """Return a line with a count for each of which some were not written, and whose time has come."""
        told = []
        for line in self._lines.values():
            if line.held and line.until <= now:
                told.append(_told(line, now))
                line.began, line.until = now, now + WHILE
                line.held = 0
                line.ids = []
        self._forget(now)
        return told

    def _forget(self, now: int) -> None:
        self._lines = {key: line for key, line in self._lines.items() if line.held or now < line.until}


def _told(line: _Line, now: int) -> Record:
    """Return the line that stands for those that were not written."""
    last = line.last
    first = last.message.partition("\n")[0]
    seconds = (now - line.began) / SECOND
    times = "once more" if line.held == 1 else f"{line.held} times more"
    extras = {**last.extras, "repeated": line.held}
    if line.held > 1:
        extras.pop("request_id", None)
        if line.ids:
            more = ", …" if line.held > len(line.ids) else ""
            extras["request_id"] = ", ".join(line.ids) + more
    return last._replace(message=f"{first} (this line came {times} in {seconds:.0f} s)", extras=extras)
