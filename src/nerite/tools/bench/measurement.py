"""How long to measure: windows of time, until the last few of them agree."""

from __future__ import annotations

import itertools
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nerite.client.connection import Address
from nerite.core.tensor import Array
from nerite.tools.bench.forms import Scripts

# What became of requests: columns of times, in seconds of the monotonic clock that all processes share.


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


# Objectives for single requests: what makes an answer a good one, and how many were.

MEASURES = {
    "latency": "until the answer is complete",
    "ttft": "until its first token",
    "itl": "between two tokens, on average over an answer",
}
"""What an objective may be about, all in milliseconds."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An answer is good if its ``measure`` is at most ``milliseconds``."""

    measure: str
    milliseconds: float

    def met(self, records: Records) -> Array:
        """Say of each answer whether it is good."""
        met: Array = measured(records, self.measure) * 1e3 <= self.milliseconds
        return met


def measured(records: Records, measure: str) -> Array:
    """Return the seconds of a measure for each answer. What did not come in parts came as one."""
    if measure == "latency":
        return records.latency
    if not records.streamed:
        return records.latency if measure == "ttft" else np.zeros(len(records.ended))
    if measure == "ttft":
        return records.first - records.due
    between: Array = (records.last - records.first) / np.maximum(records.tokens - 1, 1)
    return between


def good(records: Records, objectives: tuple[Objective, ...]) -> int:
    """Return how many answers meet all objectives."""
    met = np.ones(len(records.ended), bool)
    for objective in objectives:
        met &= objective.met(records)
    return int(met.sum())


# What a measurement shows: rates, latencies, tokens, and what it cost the client.

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is distributed, in milliseconds."""

    mean: float
    deviation: float
    least: float
    most: float
    quantiles: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Array) -> Spread:
        """Summarise times, of which there is at least one."""
        ms = seconds * 1e3
        values = np.quantile(ms, list(QUANTILES.values()), method="inverted_cdf")
        found = dict(zip(QUANTILES, values.tolist(), strict=True))
        return cls(float(ms.mean()), float(ms.std()), float(ms.min()), float(ms.max()), found)

    def __getitem__(self, quantile: str) -> float:
        return self.quantiles[quantile]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What only answers in parts have."""

    first: Spread
    """From when a request was due to its first token."""
    between: Spread | None
    """From token to token, on average over an answer: a value for each answer of more than one token."""
    gaps: Spread | None
    """Between two parts of an answer, as they came: a value for each pair."""
    rate: float
    """Tokens a second, of all answers together."""
    mean: float
    """Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What some windows show together."""

    seconds: float
    answered: int
    rate: float
    """Answers a second."""
    failed: int
    failures: Mapping[str, int]
    latency: Spread
    lag: Spread
    """From when a request was due to when it was sent."""
    tokens: Tokens | None
    goodput: float | None
    """Good answers a second; None without objectives."""
    latencies: Array = field(repr=False, default_factory=lambda: np.empty(0))
    """Quantiles of the latency in milliseconds, evenly spaced, for a plot."""


def figures(windows: Sequence[Window], objectives: tuple[Objective, ...] = ()) -> Figures | None:
    """Return what windows show together; None if no request was answered in them."""
    records = Records.joined([window.records for window in windows])
    if not len(records.ended):
        return None
    seconds = sum(window.seconds for window in windows)
    answered = len(records.ended)
    return Figures(
        seconds=seconds,
        answered=answered,
        rate=answered / seconds,
        failed=len(records.failed),
        failures=Counter(records.reasons),
        latency=Spread.of(records.latency),
        lag=Spread.of(records.sent - records.due),
        tokens=_tokens(records, seconds) if records.streamed else None,
        goodput=good(records, objectives) / seconds if objectives else None,
        latencies=np.quantile(records.latency, np.linspace(0, 1, 201)) * 1e3,
    )


def _tokens(records: Records, seconds: float) -> Tokens:
    several = records.tokens > 1
    between = measured(records, "itl")[several]
    total = float(records.tokens.sum())
    return Tokens(
        first=Spread.of(measured(records, "ttft")),
        between=Spread.of(between) if len(between) else None,
        gaps=Spread.of(records.gaps) if len(records.gaps) else None,
        rate=total / seconds,
        mean=total / len(records.tokens),
    )


# What generators are told: where to send what, and how much of it.

BenchProtocol = Literal["http", "grpc", "openai"]
Arrivals = Literal["constant", "poisson"]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is the same for all levels of load."""

    protocol: BenchProtocol
    address: Address
    scripts: Scripts
    """What is sent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of calls over gRPC; in requests over HTTP they are already."""
    streaming: bool = False
    """Answers come in parts."""
    decoupled: bool = False
    """The model says which response of several is the last."""
    timeout: float = 60.0
    """Seconds after which a request is given up."""

    def context(self) -> ssl.SSLContext | None:
        """Return how connections are encrypted."""
        if not self.address.tls:
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2" if self.protocol == "grpc" else "http/1.1"])
        return context


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """How much is asked: so many requests under way at any time, or so many a second."""

    concurrency: int = 0
    rate: float = 0.0
    arrivals: Arrivals = "constant"

    @property
    def open(self) -> bool:
        """Whether requests are sent without regard to answers."""
        return self.rate > 0

    @property
    def kind(self) -> str:
        """What its number means, in a word."""
        return "rate" if self.open else "concurrency"

    @property
    def value(self) -> float:
        """The number that it is known by."""
        return self.rate if self.open else self.concurrency

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.open else f"{self.concurrency}"
