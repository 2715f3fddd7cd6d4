"""One event of the log, and the forms it can be written in.

``default`` and ``ISO8601`` are Triton's: a preamble, then the message as a JSON string, so that a message can never
look like two records. ``json`` is one object a line, for machines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from nerite.core.text import MAX_NAME, MAX_RECORD, cut, shown
from nerite.observability import table

_CONTROLS = {code: f"\\u{code:04X}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Characters that a terminal may obey, which has no business to do what clients and models write."""
_ESCAPES = dict(_CONTROLS)
_ESCAPES |= {ord(char): f"\\{name}" for char, name in zip('\b\f\n\r\t"\\', 'bfnrt"\\', strict=True)}
_IN_CELLS = {code: escape for code, escape in _CONTROLS.items() if code != ord("\n")}


class Level(Enum):
    """How much an event matters; the value is the letter Triton's records begin with."""

    ERROR = "E"
    WARNING = "W"
    INFO = "I"
    VERBOSE = "V"
    """Written as INFO in Triton's forms."""


class Table:
    """Rows for people in a text log, objects for machines in a JSON log."""

    __slots__ = ("headings", "rows")

    def __init__(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.headings = headings
        self.rows = rows


class Record(NamedTuple):
    """An event: when, where, what."""

    level: Level
    message: str
    file: str
    """The name of the source file, without its directory."""
    line: int
    pid: int
    time_ns: int
    """Since the epoch."""
    table: Table | None = None
    """Stands below the message."""
    extras: Mapping[str, object] = MappingProxyType({})
    """More about the event, such as ``model``, ``instance`` or ``request_id``."""


def bounded(record: Record) -> Record:
    """Return ``record`` with its message and the names and ids among its extras cut to their limits."""
    if len(record.message) > MAX_RECORD:
        record = record._replace(message=cut(record.message, MAX_RECORD))
    long = {
        name: shown(value, MAX_NAME)
        for name, value in record.extras.items()
        if isinstance(value, str) and len(value) > MAX_NAME
    }
    return record._replace(extras={**record.extras, **long}) if long else record


class Formatter(Protocol):
    """Turns a record into text, without the newline at its end."""

    def format(self, record: Record) -> str:
        """Return the text of ``record``."""


class TextFormatter:
    """Triton's two forms. Of the extras ``instance`` and ``request_id`` are shown, in front of the message."""

    def __init__(self, *, iso8601: bool = False, escape: bool = True, width: int = table.WIDE) -> None:
        self._iso8601 = iso8601
        self._escape = escape
        self._width = width
        self._second = -1
        self._stamp = ""

    def format(self, record: Record) -> str:
        """Return the preamble, the message, and on lines of its own the table."""
        message = record.message
        if request_id := record.extras.get("request_id"):
            message = f"[request id: {request_id}] {message}"
        if instance := record.extras.get("instance"):
            message = f"[{instance}] {message}"
        # A table alone has no message, and none is written as "".
        text = self._quote(message) if message or record.table is None else ""
        if record.table is not None:
            rows = [[self._plain(cell) for cell in row] for row in record.table.rows]
            text += "\n" + table.render(record.table.headings, rows, self._width) + "\n"
        return f"{self._time(record)} {record.pid} {record.file}:{record.line}] {text}"

    def _quote(self, message: str) -> str:
        if not self._escape:
            return message
        if not message.isprintable() or '"' in message or "\\" in message:
            message = message.translate(_ESCAPES)
        return f'"{message}"'

    def _plain(self, cell: str) -> str:
        return cell.translate(_IN_CELLS) if self._escape and not cell.isprintable() else cell

    def _time(self, record: Record) -> str:
        second, rest = divmod(record.time_ns, 1_000_000_000)
        letter = "I" if record.level is Level.VERBOSE else record.level.value
        if second != self._second:
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ" if self._iso8601 else "%m%d %H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._stamp} {letter}" if self._iso8601 else f"{letter}{self._stamp}.{rest // 1000:06d}"


class JsonFormatter:
    """One object a line: time, level, message, file, line, pid, then the extras, and a table as a list of objects."""

    def format(self, record: Record) -> str:
        """Return the object. An extra that JSON has no form for is written as its ``str()``."""
        second, rest = divmod(record.time_ns, 1_000_000_000)
        event: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)) + f".{rest // 1000:06d}Z",
            "level": record.level.name.lower(),
            "message": record.message,
            "file": record.file,
            "line": record.line,
            "pid": record.pid,
        }
        event.update((name, value) for name, value in record.extras.items() if name not in event)
        if record.table is not None:
            headings = [heading.lower() for heading in record.table.headings]
            event["table"] = [dict(zip(headings, row, strict=True)) for row in record.table.rows]
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str)
        return text if text.isprintable() else text.translate(_CONTROLS)
