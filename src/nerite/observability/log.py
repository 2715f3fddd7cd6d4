"""The log of the server: ``log.info("…")`` from anywhere, in Triton's record format or as JSON.

There is one, ``log``, because its settings belong to the process: flags set them at start, and clients change them
through the logging extension. A call whose level is off costs a method call and a comparison; if building the message
is expensive, check first: ``if log.verbose_level >= 1``. Repeated warnings and errors are counted instead of written.

Packages below this one, libraries and models use the standard ``logging`` module, whose records arrive here through
``install_logging``. Worker processes do not write: they send their lines to the server (``worker_line``), so that all
lines have the same format and are never mixed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Final, get_args

from nerite.config.options import LogFormat, LogOptions
from nerite.core.failures import ExceptionText
from nerite.core.request import at_hand, current_request_ids
from nerite.core.text import terminal_width
from nerite.observability.captured_output import CapturedOutput
from nerite.observability.log_records import (
    JsonFormatter,
    LogFormatter,
    LogLevel,
    LogRecord,
    LogSink,
    LogTable,
    TextFormatter,
    bounded,
)

if TYPE_CHECKING:
    from nerite.observability.recent_log import RecentLog

BURST: Final = 10
"""Number of equal lines that are written within ``SECOND``; further ones are counted."""
SECOND: Final = 1_000_000_000
SUMMARY_INTERVAL: Final = 10 * SECOND
"""Interval between summaries of a line that keeps repeating."""
_MAX_LINES: Final = 1000
"""Maximum number of distinct lines that are tracked. Others are always written."""
_MAX_IDS: Final = 8
"""Maximum number of request ids in a summary."""


class _RepeatedLine:
    """State of a line that was written and may repeat."""

    __slots__ = ("began", "held", "ids", "last", "until", "written")

    def __init__(self, now: int) -> None:
        self.began = now
        self.until = now + SECOND
        """End of the period, when a summary is due if lines were held back."""
        self.written = 0
        self.held = 0
        """Number of lines held back in this period."""
        self.last: LogRecord
        """The last one of those."""
        self.ids: list[str] = []
        """Ids of the requests that they concern, the first few."""


class RepeatLimiter:
    """Decides which lines are written, and summarizes the others. Has no clock.

    A model that fails a thousand times a second logs the same line as often: that fills disks and hides other lines.
    """

    def __init__(self) -> None:
        self.lines: dict[Hashable, _RepeatedLine] = {}

    def admits(self, record: LogRecord, now: int) -> bool:
        """Return whether to write a record now; if not, it becomes part of a summary."""
        # The key has no reference to the message, which may be long.
        text = record.message
        key = (record.level, record.file, record.line, len(text), hash(text), record.extras.get("instance"))
        line = self.lines.get(key)
        if line is not None and line.until <= now and not line.held:
            del self.lines[key]
            line = None
        if line is None:
            if len(self.lines) >= _MAX_LINES:
                self._forget(now)
                if len(self.lines) >= _MAX_LINES:
                    return True
            line = self.lines[key] = _RepeatedLine(now)
        if line.written < BURST:
            line.written += 1
            return True
        line.held += 1
        line.last = record
        request_id = record.extras.get("request_id")
        if request_id and len(line.ids) < _MAX_IDS:
            line.ids.append(str(request_id))
        return False

    def next_time(self) -> int | None:
        """Return the time at which the next summary is due; None if no line is held back."""
        return min((line.until for line in self.lines.values() if line.held), default=None)

    def due(self, now: int) -> list[LogRecord]:
        """Return the summaries that are due, and start a new period for their lines."""
        summaries = []
        for line in self.lines.values():
            if line.held and line.until <= now:
                summaries.append(_summary(line, now))
                line.began, line.until = now, now + SUMMARY_INTERVAL
                line.held = 0
                line.ids = []
        self._forget(now)
        return summaries

    def _forget(self, now: int) -> None:
        self.lines = {key: line for key, line in self.lines.items() if line.held or now < line.until}


def _summary(line: _RepeatedLine, now: int) -> LogRecord:
    last = line.last
    first = last.message.partition("\n")[0]
    seconds = (now - line.began) / SECOND
    times = "once" if line.held == 1 else f"{line.held} times"
    extras = {**last.extras, "repeated": line.held}
    if line.held > 1:
        extras.pop("request_id", None)
        if line.ids:
            more = ", …" if line.held > len(line.ids) else ""
            extras["request_id"] = ", ".join(line.ids) + more
    return last._replace(message=f"{first} (repeated {times} in {seconds:.0f} s)", extras=extras)


_FORMATS: dict[str, LogFormat] = {name: name for name in get_args(LogFormat)}
_TO_STDERR = frozenset({LogLevel.ERROR, LogLevel.WARNING})
_ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"


class Log:
    """A log whose levels and format can be changed at run time; it writes to two streams or to one file."""

    def __init__(self, out: LogSink, err: LogSink) -> None:
        self.info_enabled = True
        self.warning_enabled = True
        self.error_enabled = True
        self.verbose_level = 0
        self.file = ""
        """Path of the log file; empty if records go to the standard streams."""
        self.format: LogFormat = "default"
        self.forward: Callable[[LogRecord], None] | None = None
        """Takes the records of a process whose log another process writes. Called on any thread."""
        self.followers: set[Callable[[], None]] = set()
        """Called when the verbosity may have changed, on the thread that changes it."""
        self.recent: RecentLog | None = None
        """Keeps the last records that are written, if anybody reads them there."""
        self._streams = (out, err)
        self._file: LogSink | None = None
        self._formatter: LogFormatter = _formatter("default")
        self._repeats = RepeatLimiter()
        self._repeats_lock = threading.Lock()
        self._repeats_timer: threading.Timer | None = None
        """Fires when the next summary is due; None if no line is held back."""

    def configure(self, options: LogOptions) -> None:
        """Apply all options. Raises ``OSError``, and changes nothing, if the log file cannot be opened."""
        file = LogSink.to_file(options.file) if options.file else None
        self.info_enabled = options.info
        self.warning_enabled = options.warning
        self.error_enabled = options.error
        self.verbose_level = options.verbose
        self.set_format(options.format)
        before, self._file, self.file = self._file, file, options.file
        if before is not None:
            before.close()

    @property
    def options(self) -> LogOptions:
        """All options as ``configure`` takes them."""
        return LogOptions(
            verbose=self.verbose_level,
            info=self.info_enabled,
            warning=self.warning_enabled,
            error=self.error_enabled,
            format=self.format,
            file=self.file,
        )

    def set_format(self, name: str) -> None:
        """Change the format, from the next record on. Raises ``ValueError`` for an unknown one."""
        if name not in _FORMATS:
            raise ValueError(name)
        self.format = _FORMATS[name]
        self._formatter = _formatter(self.format)

    @property
    def settings(self) -> dict[str, bool | int | str]:
        """All settings by their names in the logging extension."""
        return {
            "log_file": self.file,
            "log_info": self.info_enabled,
            "log_warning": self.warning_enabled,
            "log_error": self.error_enabled,
            "log_verbose_level": self.verbose_level,
            "log_format": self.format,
        }

    def change(self, settings: Mapping[str, bool | int | str]) -> None:
        """Change some settings, whose types the caller has checked, from the next record on.

        Raises ``ValueError``, and changes nothing, for an unknown format.
        """
        self.set_format(str(settings.get("log_format", self.format)))
        self.info_enabled = bool(settings.get("log_info", self.info_enabled))
        self.warning_enabled = bool(settings.get("log_warning", self.warning_enabled))
        self.error_enabled = bool(settings.get("log_error", self.error_enabled))
        self.verbose_level = int(settings.get("log_verbose_level", self.verbose_level))
        for follower in tuple(self.followers):
            follower()

    def info(self, message: str, **extras: object) -> None:
        """Log a normal event. ``extras`` become keys of a JSON record."""
        if self.info_enabled:
            self._log(LogLevel.INFO, message, extras)

    def warning(self, message: str, **extras: object) -> None:
        """Log a possible problem."""
        if self.warning_enabled:
            self._log(LogLevel.WARNING, message, extras)

    def error(self, message: str, **extras: object) -> None:
        """Log a failure."""
        if self.error_enabled:
            self._log(LogLevel.ERROR, message, extras)

    def verbose(self, level: int, message: str, **extras: object) -> None:
        """Log a detail if the verbosity is at least ``level``."""
        if self.verbose_level >= level:
            self._log(LogLevel.VERBOSE, message, extras)

    def table(self, table: LogTable, heading: str = "") -> None:
        """Log a table below ``heading``, at level info."""
        if self.info_enabled:
            self._log(LogLevel.INFO, heading, {}, table)

    def wants(self, level: LogLevel) -> bool:
        """Return whether records of this level are written; of VERBOSE, those of verbosity 1."""
        match level:
            case LogLevel.ERROR:
                return self.error_enabled
            case LogLevel.WARNING:
                return self.warning_enabled
            case LogLevel.INFO:
                return self.info_enabled
        return self.verbose_level >= 1

    def relay(self, record: LogRecord) -> None:
        """Write a record of a worker or of the ``logging`` module if its level is enabled."""
        if self.wants(record.level):
            self._write(record)

    def worker_line(
        self, instance: str, level: str, text: str, file: str = "worker", line: int = 0, request_id: str = ""
    ) -> None:
        """Write a line of a worker. ``level`` is a name of the ``logging`` module; unknown ones count as INFO."""
        number = logging.getLevelNamesMapping().get(level, logging.INFO)
        self.relay(_record_now(level_of(number), text, file, line, {"instance": instance, **log_fields(request_id)}))

    def _log(self, level: LogLevel, message: str, extras: dict[str, object], table: LogTable | None = None) -> None:
        caller = sys._getframe(2)
        file = caller.f_code.co_filename.rpartition("/")[2]
        self._write(_record_now(level, message, file, caller.f_lineno, extras, table))

    def _write(self, record: LogRecord) -> None:
        record = bounded(record)
        if self.forward is not None:
            self.forward(record)
            return
        if record.level in _TO_STDERR:
            with self._repeats_lock:
                if not self._repeats.admits(record, time.monotonic_ns()):
                    if self._repeats_timer is None:
                        self._start_repeats_timer()
                    return
        self._put(record)

    def _put(self, record: LogRecord) -> None:
        if self.recent is not None:
            self.recent.add(record)
        sink = self._file or self._streams[record.level in _TO_STDERR]
        text = self._formatter.format(record)
        lost = sink.lost
        if lost:
            note = self._about_log(record, f"{lost} log records before this one were lost: {sink.problem}")
            text = f"{note}\n{text}"
        if not sink.write(text) and sink is self._file and not lost:
            note = f"cannot write the log: {sink.problem}. Records are lost until it can be written again"
            self._streams[True].write(self._about_log(record, note))

    def _about_log(self, record: LogRecord, message: str) -> str:
        """Return the line of an error of the log itself that occurred when ``record`` was to be written."""
        about = LogRecord(LogLevel.ERROR, message, "log.py", 0, os.getpid(), record.time_ns)
        return self._formatter.format(about)

    def _start_repeats_timer(self) -> None:
        """Start the timer of the next summary, if any. The caller holds the lock."""
        due = self._repeats.next_time()
        self._repeats_timer = None
        if due is not None:
            seconds = max(0, due - time.monotonic_ns()) / 1e9
            self._repeats_timer = threading.Timer(seconds, self._write_summaries)
            self._repeats_timer.daemon = True
            self._repeats_timer.start()

    def _write_summaries(self) -> None:
        with self._repeats_lock:
            summaries = self._repeats.due(time.monotonic_ns())
            self._start_repeats_timer()
        for record in summaries:
            self._put(record._replace(time_ns=time.time_ns()))


def _formatter(name: LogFormat) -> LogFormatter:
    if name == "json":
        return JsonFormatter()
    escape = os.environ.get(_ESCAPE_VARIABLE) != "0"
    return TextFormatter(iso8601=name == "ISO8601", escape=escape, width=terminal_width())


def _record_now(
    level: LogLevel, message: str, file: str, line: int, extras: Mapping[str, object], table: LogTable | None = None
) -> LogRecord:
    return LogRecord(level, message, file, line, os.getpid(), time.time_ns(), table, extras)


log = Log(LogSink(1), LogSink(2))


_OURS = ("nerite", "triton_python_backend_utils")
"""Loggers of our packages, and of models that use ``pb_utils.Logger``."""


class LogHandler(logging.Handler):
    """Passes records of the ``logging`` module to the log. DEBUG becomes verbose 1; a traceback follows its message.

    The request id of a record is that of the requests being executed, or of ``extra={"request_id": …}``. The keys of
    ``extra={"extras": {…}}`` become extras.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self.setFormatter(ExceptionText())

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, without formatting its arguments if that fails."""
        level = level_of(record.levelno)
        ours = record.name.partition(".")[0] in _OURS
        # Information of libraries is left out, unless a model causes it.
        if not self._log.wants(level) or not (ours or record.levelno >= logging.WARNING or at_hand.get()):
            return
        message = self.format(record)
        if not ours:
            message = f"{record.name}: {message}"
        pid, time_ns = record.process or os.getpid(), int(record.created * 1e9)
        extras = getattr(record, "extras", {}) | log_fields(getattr(record, "request_id", "") or current_request_ids())
        self._log.relay(LogRecord(level, message, record.filename, record.lineno, pid, time_ns, extras=extras))


def log_fields(request_id: str) -> dict[str, object]:
    """Return the extras of a record that concerns a request; none if the request has no id."""
    return {"request_id": request_id} if request_id else {}


def install_logging(log: Log) -> None:
    """Send everything to ``log`` that this process prints, warns of, or logs through the ``logging`` module.

    Of libraries, only warnings and errors are written, and all that they log while a model is executed in this process.
    """
    logging.basicConfig(handlers=[LogHandler(log)], level=logging.INFO, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.captureWarnings(True)

    def printed(level: str, text: str, file: str, line: int) -> None:
        log.relay(_record_now(LogLevel[level], text, file, line, log_fields(current_request_ids())))

    sys.stdout = CapturedOutput(1, "stdout", printed, always=True)
    sys.stderr = CapturedOutput(2, "stderr", printed, always=True)


def level_of(number: int) -> LogLevel:
    """Return the level for a level of the ``logging`` module."""
    if number >= logging.ERROR:
        return LogLevel.ERROR
    if number >= logging.WARNING:
        return LogLevel.WARNING
    return LogLevel.INFO if number >= logging.INFO else LogLevel.VERBOSE


EVERY: Final = 10.0
"""Minimum number of seconds between two log lines of a ``RateLimitedWarning``."""


class RateLimitedWarning:
    """Logs an error that may recur with every request: at once, then at most every ``EVERY`` seconds with a count."""

    __slots__ = ("_logger", "_next", "count")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.count = 0
        """Number of occurrences, logged or not."""
        self._next = 0.0

    def say(self, text: str) -> None:
        """Count the error, and log it unless one was logged within the last ``EVERY`` seconds."""
        self.count += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            self._logger.error("%s%s", text, f" ({self.count} times so far)" if self.count > 1 else "")
