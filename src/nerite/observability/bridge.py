"""Brings into the log what is said elsewhere: through the standard ``logging`` module, by warnings, by workers.

The rooms of the server below this one, and the libraries they use, say ``logging.getLogger(__name__).info(…)``; the
record that comes out is the same as if they had used ``log``, with the place they said it at.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from nerite.core.at_hand import at_hand, ids_at_hand
from nerite.core.failure_text import Formatter
from nerite.observability.log import Log
from nerite.observability.printed import PrintedLines
from nerite.observability.record import Level, Record

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
        self.setFormatter(Formatter())

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
        extras = getattr(record, "extras", {}) | about(getattr(record, "request_id", "") or ids_at_hand())
        self._log.relay(Record(level, message, record.filename, record.lineno, pid, time_ns, extras=extras))


def about(request_id: str) -> dict[str, object]:
    """Return the extras of a record about a request, none if it has no id."""
    return {"request_id": request_id} if request_id else {}


def install(log: Log) -> None:
    """Make ``log`` the one destination of ``logging``, of warnings, and of what is printed in this process.

    Of libraries only warnings and errors are taken, but for what they say while a model is executed here; of our own
    rooms what the settings of ``log`` let through.
    """
    logging.basicConfig(handlers=[LogHandler(log)], level=logging.INFO, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.captureWarnings(True)

    def printed(level: str, text: str, file: str, line: int) -> None:
        now, extras = time.time_ns(), about(ids_at_hand())
        log.relay(Record(Level[level], text, file, line, os.getpid(), now, extras=extras))

    sys.stdout = PrintedLines(1, "stdout", printed, always=True)
    sys.stderr = PrintedLines(2, "stderr", printed, always=True)


def level_of(number: int) -> Level:
    """Return our level for a level of the standard ``logging`` module."""
    if number >= logging.ERROR:
        return Level.ERROR
    if number >= logging.WARNING:
        return Level.WARNING
    return Level.INFO if number >= logging.INFO else Level.VERBOSE


class WorkerLines:
    """Called with what workers send: writes it under the name of the instance."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(
        self, instance: str, level: str, text: str, file: str = "worker", line: int = 0, request_id: str = ""
    ) -> None:
        """Write ``text``. ``level`` is a name of the ``logging`` module; any other counts as INFO."""
        number = logging.getLevelNamesMapping().get(level, logging.INFO)
        extras = {"instance": instance, **about(request_id)}
        self._log.relay(Record(level_of(number), text, file, line, os.getpid(), time.time_ns(), extras=extras))
