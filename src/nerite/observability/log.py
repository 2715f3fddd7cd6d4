"""The log: ``log.info("…")`` from anywhere in the server, in Triton's record format or as JSON.

Warnings and errors that repeat themselves all the time are counted (``repeats``). Information is written as it comes.

There is one, ``log``, because its settings belong to the process: flags set them at start and clients change them
through the logging extension. A call whose level is off costs a method call and a comparison. Where even building the
message would cost, ask first: ``if log.verbose_level >= 1``.

Worker processes do not write. They send text, level and place to the server, which passes them to ``relay``, so all
lines have one form and arrive whole.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Final, get_args

from nerite.config.options import LogFormat, LogOptions
from nerite.core.failures import ExceptionText
from nerite.core.request import at_hand, current_request_ids
from nerite.observability.log_records import (
    JsonFormatter,
    LogFormatter,
    LogLevel,
    LogRecord,
    LogSink,
    LogTable,
    TextFormatter,
    bounded,
    terminal_width,
)

# Lines that repeat themselves: the first are written as they come, and then there is one now and then, with a count.
#
# A model that fails a thousand times a second says the same a thousand times a second. That fills disks, and hides
# what else is said. Pure: told each line and the time, asked for what is to be said when it is due.

AT_ONCE: Final = 10
"""Equal lines that are written within ``SECOND``."""
SECOND: Final = 1_000_000_000
WHILE: Final = 10 * SECOND
"""How often there is a line with a count, while it goes on."""
_MAX_LINES: Final = 1000
"""Different ones that are watched. What comes beyond is written."""
_MAX_IDS: Final = 8


class _Line:
    """One that was written, and comes again perhaps."""

    __slots__ = ("began", "held", "ids", "last", "until", "written")

    def __init__(self, now: int) -> None:
        self.began = now
        self.until = now + SECOND
        self.written = 0
        self.held = 0
        """As many were not written since ``began``."""
        self.last: LogRecord
        """Of those."""
        self.ids: list[str] = []
        """Of the requests that they were about, the first few."""


class RepeatLimiter:
    """Those of one log."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def admits(self, record: LogRecord, now: int) -> bool:
        """Return whether a line is to be written now; if not, it will be among those that ``due`` counts."""
        # Messages may be long, and quote what clients send.
        text = record.message
        key = (record.level, record.file, record.line, len(text), hash(text), record.extras.get("instance"))
        line = self._lines.get(key)
        if line is not None and line.until <= now and not line.held:
            del self._lines[key]
            line = None
        if line is None:
            if len(self._lines) >= _MAX_LINES:
                self._forget(now)
                if len(self._lines) >= _MAX_LINES:
                    return True
            line = self._lines[key] = _Line(now)
        if line.written < AT_ONCE:
            line.written += 1
            return True
        line.held += 1
        line.last = record
        request_id = record.extras.get("request_id")
        if request_id and len(line.ids) < _MAX_IDS:
            line.ids.append(str(request_id))
        return False

    def next_time(self) -> int | None:
        """Return when to ask ``due``; None while there is nothing to be said."""
        return min((line.until for line in self._lines.values() if line.held), default=None)

    def due(self, now: int) -> list[LogRecord]:
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


def _told(line: _Line, now: int) -> LogRecord:
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


_FORMATS: dict[str, LogFormat] = {name: name for name in get_args(LogFormat)}
_LOUD = frozenset({LogLevel.ERROR, LogLevel.WARNING})
_NO_ESCAPE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"


class Log:
    """Levels that can be switched while the server runs, one form, and two streams or one file."""

    def __init__(self, out: LogSink, err: LogSink) -> None:
        self.info_enabled = True
        self.warning_enabled = True
        self.error_enabled = True
        self.verbose_level = 0
        self._streams = (out, err)
        self._file: LogSink | None = None
        self._file_name = ""
        self._format: LogFormat = "default"
        self._formatter: LogFormatter = _formatter("default")
        self._repeats = RepeatLimiter()
        self._repeats_lock = threading.Lock()
        self._counting: threading.Timer | None = None
        """Runs while lines are held back, until it tells how many."""

    def configure(self, options: LogOptions) -> None:
        """Take over all settings. Raises ``OSError`` if the log file cannot be opened; nothing is changed then."""
        file = LogSink.to_file(options.file) if options.file else None
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
            self._here(LogLevel.INFO, message, extras)

    def warning(self, message: str, **extras: object) -> None:
        """Log what looks wrong."""
        if self.warning_enabled:
            self._here(LogLevel.WARNING, message, extras)

    def error(self, message: str, **extras: object) -> None:
        """Log what went wrong."""
        if self.error_enabled:
            self._here(LogLevel.ERROR, message, extras)

    def verbose(self, level: int, message: str, **extras: object) -> None:
        """Log a detail that is wanted from verbosity ``level`` on."""
        if self.verbose_level >= level:
            self._here(LogLevel.VERBOSE, message, extras)

    def table(self, table: LogTable, heading: str = "", *, verbose: int = 0) -> None:
        """Log a table below ``heading``, as information, or as a detail of level ``verbose`` if that is not zero."""
        if self.verbose_level >= verbose if verbose else self.info_enabled:
            self._here(LogLevel.VERBOSE if verbose else LogLevel.INFO, heading, {}, table)

    def wants(self, level: LogLevel, verbose: int = 1) -> bool:
        """Return whether an event of this level, and for VERBOSE of this degree, would be written."""
        match level:
            case LogLevel.ERROR:
                return self.error_enabled
            case LogLevel.WARNING:
                return self.warning_enabled
            case LogLevel.INFO:
                return self.info_enabled
        return self.verbose_level >= verbose

    def relay(self, record: LogRecord, verbose: int = 1) -> None:
        """Write an event that happened elsewhere, in a worker or a library, if its level is on."""
        if self.wants(record.level, verbose):
            self._write(record)

    def _here(self, level: LogLevel, message: str, extras: dict[str, object], table: LogTable | None = None) -> None:
        caller = sys._getframe(2)
        file = caller.f_code.co_filename.rpartition("/")[2]
        self._write(
            LogRecord(level, message, file, caller.f_lineno, os.getpid(), time.time_ns(), table=table, extras=extras)
        )

    def _write(self, record: LogRecord) -> None:
        record = bounded(record)
        if record.level in _LOUD:
            with self._repeats_lock:
                if not self._repeats.admits(record, time.monotonic_ns()):
                    if self._counting is None:
                        self._count_on()
                    return
        self._put(record)

    def _put(self, record: LogRecord) -> None:
        sink = self._file or self._streams[record.level in _LOUD]
        text = self._formatter.format(record)
        lost = sink.lost
        if lost:
            told = self._told(record, f"{lost} log records before this one were lost: {sink.problem}")
            text = f"{told}\n{text}"
        if not sink.write(text) and sink is self._file and not lost:
            told = f"cannot write the log: {sink.problem}. Records are lost until that is possible again"
            self._streams[True].write(self._told(record, told))

    def _told(self, record: LogRecord, message: str) -> str:
        """Return the line of a record about the log itself, made when ``record`` was to be written."""
        about = LogRecord(LogLevel.ERROR, message, "log.py", 0, os.getpid(), record.time_ns)
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


def _formatter(name: LogFormat) -> LogFormatter:
    if name == "json":
        return JsonFormatter()
    escape = os.environ.get(_NO_ESCAPE) != "0"
    return TextFormatter(iso8601=name == "ISO8601", escape=escape, width=terminal_width())


log = Log(LogSink(1), LogSink(2))

# stdout and stderr of a worker, or of a server with models in it, as Python sees them.


class CapturedOutput(io.TextIOWrapper):
    """Passes lines that are printed while a request with an id is executed to the log, which notes the id.

    All else goes where it would have gone without: to the file descriptor, which the server reads too.
    """

    def __init__(
        self, descriptor: int, name: str, log: Callable[[str, str, str, int], None], *, always: bool = False
    ) -> None:
        """``log`` takes level, text, file and line. ``always``: everything goes there."""
        super().__init__(
            io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self._name = name
        self._log = log
        self._always = always
        self._rest = ""
        self._ids = ""
        """Of the requests that the unfinished line belongs to."""

    def write(self, text: str, /) -> int:
        """Take text; a line counts when it ends, or when another request begins one."""
        ids = current_request_ids()
        if ids != self._ids:
            rest, self._rest = self._rest, ""
            if rest:
                self._log("INFO", rest, self._name, 0)
            self._ids = ids
        if not ids and not self._always:
            return super().write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line:
                self._log("INFO", line, self._name, 0)
        return len(text)


# Brings into the log what is said elsewhere: through the standard ``logging`` module, by warnings, by workers.
#
# The rooms of the server below this one, and the libraries they use, say ``logging.getLogger(__name__).info(…)``; the
# record that comes out is the same as if they had used ``log``, with the place they said it at.

_OURS = ("nerite", "triton_python_backend_utils")
"""What our own rooms say, and models through ``pb_utils.Logger``."""


class LogHandler(logging.Handler):
    """Passes records on. DEBUG is verbose 1; a traceback follows its message.

    A record is about the requests that are being executed, or about that of its ``extra={"request_id": …}``. What is in
    its ``extra={"extras": {…}}`` become extras.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self.setFormatter(ExceptionText())

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, as it was given where it cannot be formatted."""
        level = level_of(record.levelno)
        ours = record.name.partition(".")[0] in _OURS
        # What libraries chat about is not for the log, unless a model has them do it.
        if not self._log.wants(level) or not (ours or record.levelno >= logging.WARNING or at_hand.get()):
            return
        message = self.format(record)
        if not ours:
            message = f"{record.name}: {message}"
        pid, time_ns = record.process or os.getpid(), int(record.created * 1e9)
        extras = getattr(record, "extras", {}) | log_fields(getattr(record, "request_id", "") or current_request_ids())
        self._log.relay(LogRecord(level, message, record.filename, record.lineno, pid, time_ns, extras=extras))


def log_fields(request_id: str) -> dict[str, object]:
    """Return the extras of a record about a request, none if it has no id."""
    return {"request_id": request_id} if request_id else {}


def install_logging(log: Log) -> None:
    """Make ``log`` the one destination of ``logging``, of warnings, and of what is printed in this process.

    Of libraries only warnings and errors are taken, but for what they say while a model is executed here; of our own
    rooms what the settings of ``log`` let through.
    """
    logging.basicConfig(handlers=[LogHandler(log)], level=logging.INFO, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.captureWarnings(True)

    def printed(level: str, text: str, file: str, line: int) -> None:
        now, extras = time.time_ns(), log_fields(current_request_ids())
        log.relay(LogRecord(LogLevel[level], text, file, line, os.getpid(), now, extras=extras))

    sys.stdout = CapturedOutput(1, "stdout", printed, always=True)
    sys.stderr = CapturedOutput(2, "stderr", printed, always=True)


def level_of(number: int) -> LogLevel:
    """Return our level for a level of the standard ``logging`` module."""
    if number >= logging.ERROR:
        return LogLevel.ERROR
    if number >= logging.WARNING:
        return LogLevel.WARNING
    return LogLevel.INFO if number >= logging.INFO else LogLevel.VERBOSE


class WorkerLines:
    """Called with what workers send: writes it under the name of the instance."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(
        self, instance: str, level: str, text: str, file: str = "worker", line: int = 0, request_id: str = ""
    ) -> None:
        """Write ``text``. ``level`` is a name of the ``logging`` module; any other counts as INFO."""
        number = logging.getLevelNamesMapping().get(level, logging.INFO)
        extras = {"instance": instance, **log_fields(request_id)}
        self._log.relay(LogRecord(level_of(number), text, file, line, os.getpid(), time.time_ns(), extras=extras))
