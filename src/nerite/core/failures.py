"""Incidents: unforeseen exceptions, numbered, counted by component, and logged with their stack once.

A callback of the event loop that can fail catches the exception, restores its own invariant, and answers with the
error that ``report`` returns. Its incident number is also in the log, so a client's report leads to a stack trace.

Also renders exceptions as text of bounded length, for errors and logs.
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
    "admission", "audit", "bls", "cache", "cancel", "channel", "device", "dispatcher", "ensemble", "grpc", "helper",
    "http", "loop", "openai", "reply", "router",
]  # fmt: skip
"""Component that caught an exception: the label of the metric. "loop" catches everything that no other one caught."""
_log = logging.getLogger("nerite.internal")
_MAX_KNOWN: Final = 1024
"""Number of distinct origins that are remembered as already logged with a stack."""


class InternalErrors:
    """Counts and logs the incidents of one process. Thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[Where] = Counter(dict.fromkeys(get_args(Where), 0))
        """Incidents by component. Initialized with zeros, or an alert would miss the first increase."""
        self._run: Final = secrets.token_hex(2)
        self._numbers = itertools.count(1)
        self._known: dict[tuple[Where, type[BaseException], str, int], str] = {}
        """First incident, logged with its stack, by component, exception type, file and line."""

    def report(self, where: Where, error: BaseException, about: str = "", request_id: str = "") -> Internal:
        """Count and log ``error``; return the error to answer with, which names the incident.

        ``about`` is appended to the log line "internal error … in <where>", for example "of model 'x'".
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
"""Singleton of the process."""
report: Final = internal_errors.report


def _origin(traceback: TracebackType | None) -> tuple[str, int]:
    """Return file and line of the frame that raised."""
    if traceback is None:
        return "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


# Text of exceptions at bounded length: models raise with messages of any size, from any depth.

_FRAMES: Final = 64
"""Innermost frames that are printed of each exception in a chain."""
_MAX_TRACEBACK: Final = 32 * 1024
"""Characters of a traceback. Longer ones lose their middle, because the end names the exception that was caught."""


_REMEDIES: Final = {
    errno.ENOSPC: "free up space there",
    errno.EDQUOT: "free up space there, or raise the quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EMFILE: "raise the open file limit (ulimit -n), or use fewer connections",
    errno.ENFILE: "raise the system's open file limit (fs.file-max)",
    errno.EACCES: "grant access to the user that the server runs as",
    errno.EROFS: "mount it read-write",
}


def system_error(error: OSError, path: object = "") -> str:
    """Describe an OS error: reason, file (``path`` if the error has none), and remedy if one is known."""
    reason = error.strerror or str(error) or type(error).__name__
    file = error.filename or path
    where = f": '{file}'" if file else ""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{reason}{where} ({remedy})" if remedy else f"{reason}{where}"


def message_of(error: BaseException) -> str:
    """Return the bounded message of an exception; it may be empty or contain lone surrogates."""
    try:
        return cut(str(error))
    except Exception:  # a broken ``__str__`` must not hide the original exception
        return "<MESSAGE UNAVAILABLE>"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, as Python prints it, at bounded length."""
    lines = traceback.format_exception(error, limit=-_FRAMES)
    return quoted_text("".join(map(cut, lines)), _MAX_TRACEBACK).rstrip("\n")


class ExceptionText(logging.Formatter):
    """Formatter for ``logging`` that bounds tracebacks and never raises."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``; message and arguments separately if they do not fit each other."""
        try:
            return super().format(record)
        except Exception:  # message and arguments come from arbitrary code
            return f"{_text_of(record.msg, str)} (not formatted: {_text_of(record.args, repr)})"

    def formatException(self, ei: Any) -> str:
        """Return the bounded traceback of a ``sys.exc_info`` tuple; empty if it has no exception."""
        return traceback_of(ei[1]) if ei[1] is not None else ""


def _text_of(value: object, write: Callable[[object], str]) -> str:
    """Return ``write(value)``, or a placeholder if the value's own method raises."""
    try:
        return cut(write(value))
    except Exception as error:
        return f"<{type(value).__name__} that raises {type(error).__name__}>"
