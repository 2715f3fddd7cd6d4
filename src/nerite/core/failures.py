"""Exceptions that the code did not foresee: numbered, counted by place, and logged with their stack once.

A callback of the event loop that can fail catches the exception, restores its own invariant, and answers with the
error that ``report`` returns. The number in that error is in the log, too, so that a client's report leads to a stack.
"""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import traceback
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, get_args

from nerite.core.errors import Internal
from nerite.core.text import cut, quoted_text

Where: TypeAlias = Literal[
    "admission", "audit", "bls", "cache", "cancel", "channel", "dispatcher", "ensemble", "grpc", "helper", "http",
    "loop", "openai", "reply",
]  # fmt: skip
"""The part of the server that caught an exception: the label of the metric. "loop" caught what no other part did."""
_log = logging.getLogger("nerite.internal")
_MAX_KNOWN: Final = 1024
"""Distinct places of origin whose stack is known to be in the log already."""


class InternalErrors:
    """Those of one process. May be told from any thread."""

    def __init__(self) -> None:
        self.counts: Counter[Where] = Counter(dict.fromkeys(get_args(Where), 0))
        """How many there were, by place. Zeros are there from the start, or an alert would miss the first increase."""
        self._run: Final = secrets.token_hex(2)
        self._numbers = itertools.count(1)
        self._known: dict[tuple[Where, type[BaseException], str, int], str] = {}
        """By place, type and line of origin, the incident under which the stack was logged."""

    def report(self, where: Where, error: BaseException, about: str = "", request_id: str = "") -> Internal:
        """Count and log ``error``; return the error to answer with, which names the incident.

        ``about`` completes the log line "internal error … in <where>", for example "of model 'x'".
        """
        self.counts[where] += 1
        incident = f"{self._run}-{next(self._numbers)}"
        file, line = _origin(error.__traceback__)
        key = (where, type(error), file, line)
        first = self._known.get(key)
        place = f"{where} {about}".rstrip()
        extra = {"request_id": request_id}
        if first is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = incident
            _log.error("internal error, incident %s, in %s", incident, place, exc_info=error, extra=extra)
        else:
            what = quoted_text(f"{type(error).__name__}: {error}")
            _log.error(
                "internal error, incident %s, in %s: %s (stack: see incident %s)", incident, place, what, first,
                extra=extra,
            )  # fmt: skip
        return Internal(f"internal error, incident {incident}: see the server's log")


internal_errors: Final = InternalErrors()
"""The process has one, as it has one log."""
report: Final = internal_errors.report


def _origin(traceback: TracebackType | None) -> tuple[str, int]:
    """Return file and line of the frame that raised."""
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


# What an exception says, at a bounded length: models raise with messages of any size, and out of any depth.

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
    return quoted_text("".join(map(cut, lines)), _MAX_TRACEBACK).rstrip("\n")


class ExceptionText(logging.Formatter):
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
