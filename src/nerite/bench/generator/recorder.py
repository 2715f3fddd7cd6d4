"""Takes down what became of requests, as cheaply as can be; others work out what it means."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from nerite.bench.records import COLUMNS, Records


class Recorder:
    """Columns of ``Records`` that grow."""

    __slots__ = ("due", "ended", "failed", "first", "gaps", "last", "parts", "reasons", "sent", "tokens")

    def __init__(self) -> None:
        self._begin()

    def answered(self, due: float, sent: float, ended: float) -> None:
        """Note an answer."""
        self.due.append(due)
        self.sent.append(sent)
        self.ended.append(ended)

    def came(self, times: Sequence[float], tokens: int) -> None:
        """Note when the parts of an answer came; before the answer itself. ``tokens`` is 0 if nobody counted."""
        self.first.append(times[0])
        self.last.append(times[-1])
        self.parts.append(len(times))
        self.tokens.append(tokens or len(times))
        self.gaps.extend(after - before for before, after in itertools.pairwise(times))

    def refused(self, reason: str) -> None:
        """Note a request that was not answered, or with an error."""
        self.failed.append(perf_counter())
        self.reasons.append(reason)

    def take(self) -> Records:
        """Return what was noted since the last time."""
        taken = Records(reasons=self.reasons, **{name: np.array(getattr(self, name)) for name in COLUMNS})
        self._begin()
        return taken

    def _begin(self) -> None:
        self.due, self.sent, self.ended = array("d"), array("d"), array("d")
        self.first, self.last = array("d"), array("d")
        self.parts, self.tokens, self.gaps = array("d"), array("d"), array("d")
        self.failed = array("d")
        self.reasons: list[str] = []
