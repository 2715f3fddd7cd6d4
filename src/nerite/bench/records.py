"""What became of requests: columns of times, in seconds of the monotonic clock that all processes share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nerite.core.tensor import Array


def _none() -> Array:
    return np.empty(0)


@dataclass(slots=True)
class Records:
    """Requests that were answered, one a row of each column, and those that failed.

    The columns from ``first`` on are those of answers that come in parts; they are empty where answers come whole.
    """

    due: Array = field(default_factory=_none)
    """When each was to be sent: what its latency counts from."""
    sent: Array = field(default_factory=_none)
    ended: Array = field(default_factory=_none)
    first: Array = field(default_factory=_none)
    """When the first part came."""
    last: Array = field(default_factory=_none)
    """When the last part came that had content."""
    parts: Array = field(default_factory=_none)
    """How many parts had content."""
    tokens: Array = field(default_factory=_none)
    """How many tokens there were, as the server says; a part counts as one where it does not."""
    gaps: Array = field(default_factory=_none)
    """The times between the parts of one answer, ``parts - 1`` for each row, in the order of the rows."""
    failed: Array = field(default_factory=_none)
    """When each of the others failed."""
    reasons: list[str] = field(default_factory=list)
    """Why each of these failed."""

    @classmethod
    def joined(cls, several: Sequence[Records]) -> Records:
        """Return the rows of several."""
        columns = {name: np.concatenate([_none(), *(getattr(each, name) for each in several)]) for name in COLUMNS}
        return cls(**columns, reasons=[reason for each in several for reason in each.reasons])

    def split(self, moment: float) -> tuple[Records, Records]:
        """Return what had ended before a moment, and the rest."""
        early = self.ended < moment
        before, after = self._chosen(early), self._chosen(~early)
        for part, mask in ((before, self.failed < moment), (after, self.failed >= moment)):
            part.failed, part.reasons = self.failed[mask], list(itertools.compress(self.reasons, mask))
        return before, after

    @property
    def streamed(self) -> bool:
        """Whether answers came in parts."""
        return len(self.first) > 0

    @property
    def latency(self) -> Array:
        """Seconds from when each was due to the end of its answer."""
        return self.ended - self.due

    def _chosen(self, mask: Array) -> Records:
        rows = {name: getattr(self, name) for name in _ROWS}
        chosen = {name: column[mask] if len(column) else column for name, column in rows.items()}
        gaps = self.gaps[np.repeat(mask, _gap_counts(self.parts))] if len(self.gaps) else self.gaps
        return Records(**chosen, gaps=gaps)


def _gap_counts(parts: Array) -> Array:
    counts: Array = np.maximum(parts - 1, 0).astype(int)
    return counts


_ROWS = ("due", "sent", "ended", "first", "last", "parts", "tokens")
COLUMNS = (*_ROWS, "gaps", "failed")
