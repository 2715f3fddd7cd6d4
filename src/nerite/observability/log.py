"""The log: ``log.info("…")`` from anywhere in the server, in Triton's record format or as JSON.

Warnings and errors that repeat themselves all the time are counted (``repeats``). Information is written as it comes.

There is one, ``log``, because its settings belong to the process: flags set them at start and clients change them
through the logging extension. A call whose level is off costs a method call and a comparison. Where even building the
message would cost, ask first: ``if log.verbose_level >= 1``.

Worker processes do not write. They send text, level and place to the server, which passes them to ``relay``, so all
lines have one form and arrive whole.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import get_args

from nerite.config.options import LogFormat, LogOptions
from nerite.observability.record import Formatter, JsonFormatter, Level, Record, Table, TextFormatter, bounded
from nerite.observability.repeats import Repeats
from nerite.observability.sink import Sink
from nerite.observability.table import terminal_width

_FORMATS: dict[str, LogFormat] = {name: name for name in get_args(LogFormat)}
_LOUD = frozenset({Level.ERROR, Level.WARNING})
_NO_ESCAPE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"


class Log:
    """Levels that can be switched while the server runs, one form, and two streams or one file."""

    def __init__(self, out: Sink, err: Sink) -> None:
        self.info_enabled = True
        self.warning_enabled = True
        self.error_enabled = True
        self.verbose_level = 0
        self._streams = (out, err)
        self._file: Sink | None = None
        self._file_name = ""
        self._format: LogFormat = "default"
        self._formatter: Formatter = _formatter("default")
        self._repeats = Repeats()
        self._repeats_lock = threading.Lock()
        self._counting: threading.Timer | None = None
        """Runs while lines are held back, until it tells how many."""

    def configure(self, options: LogOptions) -> None:
        """Take over all settings. Raises ``OSError`` if the log file cannot be opened; nothing is changed then."""
        file = Sink.to_file(options.file) if options.file else None
        self.info_enabled = options.info
        self.warning_enabled = options.warning
        self.error_enabled = options.error
        self.verbose_level = options.verbose
        self.set_format(options.format)
        before, self._file, self._file_name = self._file, file, options.file
        if before is not None:
            before.close()

    @property
    def format(self) -> LogFormat:
        """The form of records."""
        return self._format

    @property
    def file(self) -> str:
        """The path of the log file; empty where records go to the standard streams."""
        return self._file_name

    def set_format(self, name: str) -> None:
        """Change the form of the records from the next one on. Raises ``ValueError`` for a name that is none."""
        if name not in _FORMATS:
            raise ValueError(name)
        self._format = _FORMATS[name]
        self._formatter = _formatter(self._format)

    @property
    def settings(self) -> dict[str, bool | int | str]:
        """All settings, by the names that the logging extension has for them."""
        return {
            "log_file": self._file_name,
            "log_info": self.info_enabled,
            "log_warning": self.warning_enabled,
            "log_error": self.error_enabled,
            "log_verbose_level": self.verbose_level,
            "log_format": self._format,
        }

    def change(self, settings: Mapping[str, bool | int | str]) -> None:
        """Change some settings from the next record on; the types are the caller's business.

        Raises ``ValueError`` for a form that is none; nothing is changed then.
        """
        self.set_format(str(settings.get("log_format", self._format)))
        self.info_enabled = bool(settings.get("log_info", self.info_enabled))
        self.warning_enabled = bool(settings.get("log_warning", self.warning_enabled))
        self.error_enabled = bool(settings.get("log_error", self.error_enabled))
        self.verbose_level = int(settings.get("log_verbose_level", self.verbose_level))

    def info(self, message: str, **extras: object) -> None:
        """Log what happens. ``extras`` become keys of a JSON record."""
        if self.info_enabled:
            self._here(Level.INFO, message, extras)

    def warning(self, message: str, **extras: object) -> None:
        """Log what looks wrong."""
        if self.warning_enabled:
            self._here(Level.WARNING, message, extras)

    def error(self, message: str, **extras: object) -> None:
        """Log what went wrong."""
        if self.error_enabled:
            self._here(Level.ERROR, message, extras)

    def verbose(self, level: int, message: str, **extras: object) -> None:
        """Log a detail that is wanted from verbosity ``level`` on."""
        if self.verbose_level >= level:
            self._here(Level.VERBOSE, message, extras)

    def table(self, table: Table, heading: str = "", *, verbose: int = 0) -> None:
        """Log a table below ``heading``, as information, or as a detail of level ``verbose`` if that is not zero."""
        if self.verbose_level >= verbose if verbose else self.info_enabled:
            self._here(Level.VERBOSE if verbose else Level.INFO, heading, {}, table)

    def wants(self, level: Level, verbose: int = 1) -> bool:
        """Return whether an event of this level, and for VERBOSE of this degree, would be written."""
        match level:
            case Level.ERROR:
                return self.error_enabled
            case Level.WARNING:
                return self.warning_enabled
            case Level.INFO:
                return self.info_enabled
        return self.verbose_level >= verbose

    def relay(self, record: Record, verbose: int = 1) -> None:
        """Write an event that happened elsewhere, in a worker or a library, if its level is on."""
        if self.wants(record.level, verbose):
            self._write(record)

    def _here(self, level: Level, message: str, extras: dict[str, object], table: Table | None = None) -> None:
        caller = sys._getframe(2)
        file = caller.f_code.co_filename.rpartition("/")[2]
        self._write(
            Record(level, message, file, caller.f_lineno, os.getpid(), time.time_ns(), table=table, extras=extras)
        )

    def _write(self, record: Record) -> None:
        record = bounded(record)
        if record.level in _LOUD:
            with self._repeats_lock:
                if not self._repeats.admits(record, time.monotonic_ns()):
                    if self._counting is None:
                        self._count_on()
                    return
        self._put(record)

    def _put(self, record: Record) -> None:
        sink = self._file or self._streams[record.level in _LOUD]
        text = self._formatter.format(record)
        lost = sink.lost
        if lost:
            told = self._told(record, f"{lost} log records before this one were lost: {sink.problem}")
            text = f"{told}\n{text}"
        if not sink.write(text) and sink is self._file and not lost:
            told = f"cannot write the log: {sink.problem}. Records are lost until that is possible again"
            self._streams[True].write(self._told(record, told))

    def _told(self, record: Record, message: str) -> str:
        """Return the line of a record about the log itself, made when ``record`` was to be written."""
        about = Record(Level.ERROR, message, "log.py", 0, os.getpid(), record.time_ns)
        return self._formatter.format(about)

    def _count_on(self) -> None:
        """Have what is held back told of when it is due. Under the lock."""
        due = self._repeats.next_time()
        self._counting = None
        if due is not None:
            seconds = max(0, due - time.monotonic_ns()) / 1e9
            self._counting = threading.Timer(seconds, self._tell_repeats)
            self._counting.daemon = True
            self._counting.start()

    def _tell_repeats(self) -> None:
        with self._repeats_lock:
            told = self._repeats.due(time.monotonic_ns())
            self._count_on()
        for record in told:
            self._put(record._replace(time_ns=time.time_ns()))


def _formatter(name: LogFormat) -> Formatter:
    if name == "json":
        return JsonFormatter()
    escape = os.environ.get(_NO_ESCAPE) != "0"
    return TextFormatter(iso8601=name == "ISO8601", escape=escape, width=terminal_width())


log = Log(Sink(1), Sink(2))
