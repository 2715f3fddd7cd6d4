"""Log records, their formats, and the files that they are written to.

The formats ``default`` and ``ISO8601`` are Triton's: a preamble, then the message as a JSON string, so that one message
cannot look like two records. ``json`` is one JSON object per line.
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
from nerite.core.text import MAX_NAME, MAX_RECORD, UNLIMITED_WIDTH, cut, quoted_text, render_table

_WRITE_TIMEOUT = 1.0
"""Seconds to wait until a non-blocking terminal or pipe takes more."""


class LogSink:
    """Writes whole lines to a file descriptor, unbuffered and with one system call per line. Thread-safe.

    Never raises: a line that cannot be written (disk full, reader gone) is dropped and counted.
    """

    def __init__(self, fd: int, path: str = "") -> None:
        """With a ``path``, the sink owns the file and ``close`` closes it."""
        self._fd = fd
        self._path = path
        self._lock = threading.Lock()
        self._torn = False
        """The last line in the file is incomplete."""
        self.lost = 0
        """Number of lines dropped since the last one that was written."""
        self.problem = ""
        """Error with which the last of them was dropped."""

    @classmethod
    def to_file(cls, path: str) -> LogSink:
        """Open ``path`` for appending. Raises ``OSError``."""
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), path)

    def write(self, text: str) -> bool:
        """Write ``text`` and a newline; return whether the system has accepted them."""
        # What a model prints may contain surrogates, which UTF-8 cannot encode.
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
            # Another process made the shared terminal non-blocking. Wait as a blocking write would, for a while.
            if not select.select((), (self._fd,), (), _WRITE_TIMEOUT)[1]:
                raise
            return 0

    def close(self) -> None:
        """Close the file if the sink owns it. Idempotent."""
        with self._lock:
            if self._path:
                fd, self._fd, self._path = self._fd, -1, ""
                os.close(fd)


_CONTROLS = {code: f"\\u{code:04X}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Control characters: a terminal must not execute what clients and models write."""
_ESCAPES = dict(_CONTROLS)
_ESCAPES |= {ord(char): f"\\{name}" for char, name in zip('\b\f\n\r\t"\\', 'bfnrt"\\', strict=True)}
_IN_CELLS = {code: escape for code, escape in _CONTROLS.items() if code != ord("\n")}


class LogLevel(Enum):
    """Severity of a record. The value is the first letter of Triton's records."""

    ERROR = "E"
    WARNING = "W"
    INFO = "I"
    VERBOSE = "V"
    """Written as INFO in Triton's formats."""


class LogTable:
    """A table: drawn in a text log, a list of objects in a JSON log."""

    __slots__ = ("headings", "rows")

    def __init__(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.headings = headings
        self.rows = rows


class LogRecord(NamedTuple):
    """One event of the log."""

    level: LogLevel
    message: str
    file: str
    """Name of the source file, without its directory."""
    line: int
    pid: int
    time_ns: int
    """Since the epoch."""
    table: LogTable | None = None
    """Written below the message."""
    extras: Mapping[str, object] = MappingProxyType({})
    """Additional keys of a JSON record, such as ``model``, ``instance`` or ``request_id``."""


def bounded(record: LogRecord) -> LogRecord:
    """Return ``record`` with its message, and names and ids among its extras, truncated to their limits."""
    if len(record.message) > MAX_RECORD:
        record = record._replace(message=cut(record.message, MAX_RECORD))
    long = {
        name: quoted_text(value, MAX_NAME)
        for name, value in record.extras.items()
        if isinstance(value, str) and len(value) > MAX_NAME
    }
    return record._replace(extras={**record.extras, **long}) if long else record


class LogFormatter(Protocol):
    """Formats records, without a newline at the end."""

    def format(self, record: LogRecord) -> str:
        """Return the text of ``record``."""


class TextFormatter:
    """Triton's two formats. Of the extras, ``instance`` and ``request_id`` are shown in front of the message."""

    def __init__(self, *, iso8601: bool = False, escape: bool = True, width: int = UNLIMITED_WIDTH) -> None:
        self._iso8601 = iso8601
        self._escape = escape
        self._width = width
        self._second = -1
        self._stamp = ""

    def format(self, record: LogRecord) -> str:
        """Return the preamble, the message, and the table on lines of its own."""
        message = record.message
        if request_id := record.extras.get("request_id"):
            message = f"[request id: {request_id}] {message}"
        if instance := record.extras.get("instance"):
            message = f"[{instance}] {message}"
        # A table without a message has no empty quotes.
        text = self._quote(message) if message or record.table is None else ""
        if record.table is not None:
            rows = [[self._plain(cell) for cell in row] for row in record.table.rows]
            text += "\n" + render_table(record.table.headings, rows, self._width) + "\n"
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
    """One object per line: time, level, message, file, line, pid, then the extras, and a table as a list of objects."""

    def format(self, record: LogRecord) -> str:
        """Return the object. Extras that JSON cannot represent are converted by ``str()``."""
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
