"""Triton's logger for models, on top of Python's ``logging``, which models may also use directly."""

from __future__ import annotations

import logging
from typing import ClassVar

from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import BindingEnum, Mismatch, Text
from triton_python_backend_utils.errors import incompatible_call

_LOG = logging.getLogger("triton_python_backend_utils")


class Logger:
    """Writes to the server's log, with file and line of the caller.

    Raises ``TypeError`` for a message that is neither text nor ``bytes``.
    """

    class LogLevel(BindingEnum):
        """Severity of a log line, with Triton's numbers."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: Text, level: LogLevel = LogLevel.INFO) -> None:
        """Write ``message`` at ``level``."""
        try:
            line = arguments.message(message)
            severity = _STANDARD[arguments.instance(level, Logger.LogLevel)]
        except Mismatch as mismatch:
            raise incompatible_call(
                "log",
                "(message: str, level: c_python_backend_utils.Logger.LogLevel = <LogLevel.INFO: 0>) -> None",
                mismatch,
                message,
                level,
            ) from None
        _LOG.log(severity, "%s", line, stacklevel=2)

    @staticmethod
    def log_info(message: Text) -> None:
        """Log information."""
        _LOG.info("%s", _line("log_info", message), stacklevel=2)

    @staticmethod
    def log_warn(message: Text) -> None:
        """Log a warning."""
        _LOG.warning("%s", _line("log_warn", message), stacklevel=2)

    @staticmethod
    def log_error(message: Text) -> None:
        """Log an error."""
        _LOG.error("%s", _line("log_error", message), stacklevel=2)

    @staticmethod
    def log_verbose(message: Text) -> None:
        """Log a debugging detail, shown only if verbose logging is on."""
        _LOG.debug("%s", _line("log_verbose", message), stacklevel=2)


_STANDARD = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}


def _line(method: str, message: Text) -> str:
    try:
        return arguments.message(message)
    except Mismatch as mismatch:
        raise incompatible_call(method, "(message: str) -> None", mismatch, message) from None
