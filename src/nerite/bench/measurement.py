"""How long to measure: windows of time, until the last few of them agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nerite.bench.records import Records

AGREEING = 3
"""How many windows in a row have to agree. Figures are those of these windows together."""
_LONGEST = 10
"""A window with too few requests goes on for at most this many times its length."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a measurement is over."""

    seconds: float = 2.0
    """The length of a window."""
    fewest: int = 30
    """A window goes on until this many requests were answered in it."""
    percentage: float = 10.0
    """How far the rate and the latency of each window may be from their mean."""
    most: int = 10
    """The windows after which it is over in any case."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, and what ended in it."""

    began: float
    ended: float
    records: Records

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.ended - self.began

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.records.ended) / self.seconds

    @property
    def latency(self) -> float:
        """The mean; 0 if there was no answer."""
        return float(self.records.latency.mean()) if len(self.records.ended) else 0.0


class Measurement:
    """Cuts records into windows. It is told what came, and until when everything has been told."""

    def __init__(self, rule: Rule, now: float) -> None:
        self.windows: list[Window] = []
        self._rule = rule
        self._began = now
        self._records: list[Records] = []

    def add(self, records: Records, now: float) -> bool:
        """Take the records that are new; say whether a window has ended.

        Requests that end before ``now`` are all told with this call; some that end later may be among them.
        """
        self._records.append(records)
        passed = now - self._began
        if passed < self._rule.seconds:
            return False
        enough = sum(len(each.ended) + len(each.failed) for each in self._records) >= self._rule.fewest
        if not enough and passed < _LONGEST * self._rule.seconds:
            return False
        within, later = Records.joined(self._records).split(now)
        self.windows.append(Window(self._began, now, within))
        self._began, self._records = now, [later]
        return True

    @property
    def stable(self) -> bool:
        """Whether the last windows agree."""
        last = self.last
        return (
            len(last) == AGREEING
            and all(window.rate for window in last)
            and _near([window.rate for window in last], self._rule.percentage)
            and _near([window.latency for window in last], self._rule.percentage)
        )

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: they agree, or never will, or nothing is answered at all."""
        return self.stable or len(self.windows) >= self._rule.most or any(not each.rate for each in self.windows)

    @property
    def failures(self) -> Counter[str]:
        """Why requests failed, in all windows."""
        return Counter(reason for window in self.windows for reason in window.records.reasons)

    @property
    def last(self) -> list[Window]:
        """The windows that count."""
        return self.windows[-AGREEING:]

    def progress(self, now: float) -> float:
        """Return how much of the shortest possible measurement is done, from 0 to 1."""
        current = min(1.0, (now - self._began) / self._rule.seconds)
        return min(1.0, (len(self.windows) + current) / AGREEING)


def _near(values: Sequence[float], percentage: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= mean * percentage / 100 for value in values)
