"""What an exception says, at a bounded length: models raise with messages of any size, and out of any depth."""

from __future__ import annotations

import errno
import logging
import traceback
from collections.abc import Callable
from typing import Any, Final

from nerite.core.text import cut, shown

_FRAMES: Final = 64
"""Of each exception in a chain, the innermost."""
_MAX_TRACEBACK: Final = 32 * 1024
"""Characters. What is too long loses its middle: the end names the exception that was caught."""


_REMEDIES: Final = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or have fewer connections",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.EACCES: "let the user of the server have it",
    errno.EROFS: "have it mounted for writing",
}


def system_error(error: OSError, path: object = "") -> str:
    """Return what the system refuses, of which file (``path`` if the error does not say), and what helps."""
    said = error.strerror or str(error) or type(error).__name__
    file = error.filename or path
    where = f": '{file}'" if file else ""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{said}{where} ({remedy})" if remedy else f"{said}{where}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception, which may be empty, or text that cannot be encoded."""
    try:
        return cut(str(error))
    except Exception:  # its own ``__str__`` may be broken, and that is not what the reader is looking for
        return "<MESSAGE UNAVAILABLE>"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and of what caused it, as Python prints it."""
    lines = traceback.format_exception(error, limit=-_FRAMES)
    return shown("".join(map(cut, lines)), _MAX_TRACEBACK).rstrip("\n")


class Formatter(logging.Formatter):
    """Writes what ``logging`` is given, tracebacks at a bounded length; never raises."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, as it was given where its arguments do not fit its message."""
        try:
            return super().format(record)
        except Exception:  # the arguments are anybody's
            return f"{_text_of(record.msg, str)} (not formatted: {_text_of(record.args, repr)})"

    def formatException(self, ei: Any) -> str:
        """Return the traceback of what ``sys.exc_info`` returned, if it is of an exception."""
        return traceback_of(ei[1]) if ei[1] is not None else ""


def _text_of(value: object, write: Callable[[object], str]) -> str:
    """Return what ``write`` makes of a value whose own methods may raise."""
    try:
        return cut(write(value))
    except Exception as error:
        return f"<{type(value).__name__} that raises {type(error).__name__}>"
