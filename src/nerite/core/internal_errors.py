"""Exceptions that the code did not foresee: numbered, counted by place, and logged with their stack once.

A callback of the event loop that can fail catches the exception, restores its own invariant, and answers with the
error that ``report`` returns. The number in that error is in the log, too, so that a client's report leads to a stack.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import Counter
from types import TracebackType
from typing import Final, Literal, TypeAlias, get_args

from nerite.core.errors import Internal
from nerite.core.text import shown

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
            what = shown(f"{type(error).__name__}: {error}")
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
