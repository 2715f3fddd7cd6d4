"""One event of the log, and the forms it can be written in.

``default`` and ``ISO8601`` are Triton's: a preamble, then the message as a JSON string, so that a message can never
look like two records. ``json`` is one object a line, for machines.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from nerite.core.failures import system_error
from nerite.core.text import MAX_NAME, MAX_RECORD, cut, quoted_text

# Where log records go: stdout and stderr, or a file.

_PATIENCE = 1.0


class LogSink:
    """Writes whole lines to a file descriptor: one system call a line, nothing buffered, lines never mixed.

    Never raises: where a line cannot be written (disk full, reader gone) it is dropped and counted, and serving goes
    on.
    """

    def __init__(self, fd: int, path: str = "") -> None:
        """With a ``path`` it is the sink's own file, which ``close`` closes."""
        self._fd = fd
        self._path = path
        self._lock = threading.Lock()
        self._torn = False
        """The last line in the file has no end."""
        self.lost = 0
        """Lines that were dropped since the last that was written."""
        self.problem = ""
        """Why the last of them was."""

    @classmethod
    def to_file(cls, path: str) -> LogSink:
        """Open ``path`` for appending. Raises ``OSError``."""
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), path)

    def write(self, text: str) -> bool:
        """Write ``text`` and a newline; return when the system has taken them, with False if it has not."""
        # What a model printed may be no text that UTF-8 can hold; a log line is not worth an exception.
        line = (text + "\n").encode(errors="backslashreplace")
        with self._lock:
            left = memoryview(b"\n" + line if self._torn else line)
            size = len(left)
            try:
                while left:
                    left = left[self._write(left) :]
            except OSError as error:
                self._torn = self._torn or 0 < len(left) < size
                self.lost += 1
                self.problem = system_error(error, self._path)
                return False
            self._torn = False
            self.lost = 0
        return True

    def _write(self, line: memoryview) -> int:
        try:
            return os.write(self._fd, line)
        except BlockingIOError:
            # Somebody who shares the terminal made it non-blocking. Wait as a plain write would, for a while.
            if not select.select((), (self._fd,), (), _PATIENCE)[1]:
                raise
            return 0

    def close(self) -> None:
        """Close the file, if this sink opened it."""
        with self._lock:
            if self._path:
                fd, self._fd, self._path = self._fd, -1, ""
                os.close(fd)


# ASCII tables for the log: ``+---+`` lines, one row of headings, cells of one or more lines.

WIDE = 500
"""Columns to use where the output is no terminal."""


def render(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDE) -> str:
    """Draw a table no wider than ``width``, as long as a column can have one character.

    A column that needs less than its equal share leaves the rest to the wider ones; what does not fit is wrapped.
    """
    cells = [[cell.split("\n") for cell in row] for row in (headings, *rows)]
    natural = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    widths = share(natural, width - 3 * len(headings) - 1)
    divider = "+" + "".join("-" * (size + 2) + "+" for size in widths)
    head, *body = ["\n".join(_lines(row, widths)) for row in cells]
    return "\n".join([divider, head, divider, *body, divider])


def share(natural: Sequence[int], available: int) -> list[int]:
    """Divide ``available`` columns of text among cells that would like to have their ``natural`` width."""
    widths = [0] * len(natural)
    left = max(available, len(natural))
    by_need = sorted(range(len(natural)), key=lambda index: natural[index])
    for position, index in enumerate(by_need):
        widths[index] = max(1, min(natural[index], left // (len(by_need) - position)))
        left -= widths[index]
    return widths


def terminal_width() -> int:
    """Return the columns of the terminal behind stdout, or ``WIDE`` where there is none."""
    try:
        return os.get_terminal_size(1).columns or WIDE
    except OSError:
        return WIDE


def _lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    wrapped = [
        [line[at : at + size] for line in cell for at in range(0, len(line) or 1, size)]
        for cell, size in zip(row, widths, strict=True)
    ]
    height = max(map(len, wrapped))
    return [
        "|"
        + "".join(f" {cell[at] if at < len(cell) else '':{size}} |" for cell, size in zip(wrapped, widths, strict=True))
        for at in range(height)
    ]


_CONTROLS = {code: f"\\u{code:04X}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Characters that a terminal may obey, which has no business to do what clients and models write."""
_ESCAPES = dict(_CONTROLS)
_ESCAPES |= {ord(char): f"\\{name}" for char, name in zip('\b\f\n\r\t"\\', 'bfnrt"\\', strict=True)}
_IN_CELLS = {code: escape for code, escape in _CONTROLS.items() if code != ord("\n")}


class LogLevel(Enum):
    """How much an event matters; the value is the letter Triton's records begin with."""

    ERROR = "E"
    WARNING = "W"
    INFO = "I"
    VERBOSE = "V"
    """Written as INFO in Triton's forms."""


class LogTable:
    """Rows for people in a text log, objects for machines in a JSON log."""

    __slots__ = ("headings", "rows")

    def __init__(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.headings = headings
        self.rows = rows


class LogRecord(NamedTuple):
    """An event: when, where, what."""

    level: LogLevel
    message: str
    file: str
    """The name of the source file, without its directory."""
    line: int
    pid: int
    time_ns: int
    """Since the epoch."""
    table: LogTable | None = None
    """Stands below the message."""
    extras: Mapping[str, object] = MappingProxyType({})
    """More about the event, such as ``model``, ``instance`` or ``request_id``."""


def bounded(record: LogRecord) -> LogRecord:
    """Return ``record`` with its message and the names and ids among its extras cut to their limits."""
    if len(record.message) > MAX_RECORD:
        record = record._replace(message=cut(record.message, MAX_RECORD))
    long = {
        name: quoted_text(value, MAX_NAME)
        for name, value in record.extras.items()
        if isinstance(value, str) and len(value) > MAX_NAME
    }
    return record._replace(extras={**record.extras, **long}) if long else record


class LogFormatter(Protocol):
    """Turns a record into text, without the newline at its end."""

    def format(self, record: LogRecord) -> str:
        """Return the text of ``record``."""


class TextFormatter:
    """Triton's two forms. Of the extras ``instance`` and ``request_id`` are shown, in front of the message."""

    def __init__(self, *, iso8601: bool = False, escape: bool = True, width: int = WIDE) -> None:
        self._iso8601 = iso8601
        self._escape = escape
        self._width = width
        self._second = -1
        self._stamp = ""

    def format(self, record: LogRecord) -> str:
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
            text += "\n" + render(record.table.headings, rows, self._width) + "\n"
        return f"{self._time(record)} {record.pid} {record.file}:{record.line}] {text}"

    def _quote(self, message: str) -> str:
        if not self._escape:
            return message
        if not message.isprintable() or '"' in message or "\\" in message:
            message = message.translate(_ESCAPES)
        return f'"{message}"'

    def _plain(self, cell: str) -> str:
        return cell.translate(_IN_CELLS) if self._escape and not cell.isprintable() else cell

    def _time(self, record: LogRecord) -> str:
        second, rest = divmod(record.time_ns, 1_000_000_000)
        letter = "I" if record.level is LogLevel.VERBOSE else record.level.value
        if second != self._second:
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ" if self._iso8601 else "%m%d %H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._stamp} {letter}" if self._iso8601 else f"{letter}{self._stamp}.{rest // 1000:06d}"


class JsonFormatter:
    """One object a line: time, level, message, file, line, pid, then the extras, and a table as a list of objects."""

    def format(self, record: LogRecord) -> str:
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
