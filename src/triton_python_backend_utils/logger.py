"""Log lines of a model. They go to Python's ``logging``, as those that the model writes there itself."""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import ClassVar

_LOG = logging.getLogger("triton_python_backend_utils")


class Logger:
    """Writes to the server's log, with the file and the line of the caller."""

    class LogLevel(IntEnum):
        """How serious a line is, with Triton's numbers."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Write ``message`` at ``level``."""
        _LOG.log(_STANDARD[level], "%s", message, stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """Write what is worth knowing."""
        _LOG.info("%s", message, stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write what may be wrong."""
        _LOG.warning("%s", message, stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """Write what is wrong."""
        _LOG.error("%s", message, stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write what helps to find a fault; shown when the server logs verbosely."""
        _LOG.debug("%s", message, stacklevel=2)


_STANDARD = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}
