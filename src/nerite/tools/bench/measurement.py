"""Records of requests, the windows of a measurement, the figures computed from them, and what generators are told."""

from __future__ import annotations

import itertools
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from nerite.client.connection import Address
from nerite.core.tensor import Array
from nerite.tools.bench.forms import Scripts


def _empty() -> Array:
    return np.empty(0)


@dataclass(slots=True)
class Records:
    """Columns with a row for each answered request, and separate columns for failed ones.

    Times are in seconds of the monotonic clock, which all processes share. The columns from ``first`` to ``gaps`` are
    filled for streamed answers only, ``model`` and ``texts`` for planned requests only.
    """

    due: Array = field(default_factory=_empty)
    """Scheduled sending time of each request, from which its latency counts."""
    sent: Array = field(default_factory=_empty)
    ended: Array = field(default_factory=_empty)
    first: Array = field(default_factory=_empty)
    """Arrival of the first part."""
    last: Array = field(default_factory=_empty)
    """Arrival of the last part with content."""
    parts: Array = field(default_factory=_empty)
    """Number of parts with content."""
    tokens: Array = field(default_factory=_empty)
    """Number of tokens as reported by the server, or else the number of parts."""
    prompt: Array = field(default_factory=_empty)
    """Number of tokens of the prompt as reported by the server, or 0."""
    cached: Array = field(default_factory=_empty)
    """How many of these the server had in its cache, or 0."""
    model: Array = field(default_factory=_empty)
    """Place of the model or adapter in the plan's list."""
    texts: Array = field(default_factory=_empty)
    """Number of texts of the request."""
    gaps: Array = field(default_factory=_empty)
    """Times between the parts of an answer: ``parts - 1`` values for each row, in the order of the rows."""
    failed: Array = field(default_factory=_empty)
    """Time at which each failed request failed."""
    cancelled: Array = field(default_factory=_empty)
    """Time at which the client cancelled each request that it did."""
    reasons: list[str] = field(default_factory=list)
    """Reason of each failure."""

    @classmethod
    def joined(cls, several: Sequence[Records]) -> Records:
        """Concatenate several records."""
        columns = {name: np.concatenate([_empty(), *(getattr(each, name) for each in several)]) for name in COLUMNS}
        return cls(**columns, reasons=[reason for each in several for reason in each.reasons])

    def split(self, moment: float) -> tuple[Records, Records]:
        """Return the requests that ended before a moment, and the rest."""
        early = self.ended < moment
        before, after = self._chosen(early), self._chosen(~early)
        for part, mask in ((before, self.failed < moment), (after, self.failed >= moment)):
            part.failed, part.reasons = self.failed[mask], list(itertools.compress(self.reasons, mask))
        before.cancelled = self.cancelled[self.cancelled < moment]
        after.cancelled = self.cancelled[self.cancelled >= moment]
        return before, after

    @property
    def streamed(self) -> bool:
        """True if answers were streamed."""
        return len(self.first) > 0

    @property
    def latency(self) -> Array:
        """Seconds from the scheduled time of each request to the end of its answer."""
        return self.ended - self.due

    def _chosen(self, mask: Array) -> Records:
        rows = {name: getattr(self, name) for name in _ROWS}
        chosen = {name: column[mask] if len(column) else column for name, column in rows.items()}
        gaps = self.gaps[np.repeat(mask, _gap_counts(self.parts))] if len(self.gaps) else self.gaps
        return Records(**chosen, gaps=gaps)


def _gap_counts(parts: Array) -> Array:
    counts: Array = np.maximum(parts - 1, 0).astype(int)
    return counts


_ROWS = ("due", "sent", "ended", "first", "last", "parts", "tokens", "prompt", "cached", "model", "texts")
COLUMNS = (*_ROWS, "gaps", "failed", "cancelled")

AGREEING = 3
"""Number of consecutive windows that must agree. Figures are computed over these windows."""
_MAX_EXTENSION = 10
"""A window with too few requests is extended to at most this multiple of its length."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Length of windows, and when a measurement ends."""

    seconds: float = 2.0
    """Length of a window."""
    fewest: int = 30
    """A window is extended until at least this many requests have ended in it."""
    percentage: float = 10.0
    """Maximum deviation of the rate and the latency of each window from their mean, in percent."""
    most: int = 10
    """Maximum number of windows, even if they do not agree."""
    whole: bool = False
    """The load has an end: figures are computed over all windows, from the first request to the last answer."""


@dataclass(frozen=True, slots=True)
class Window:
    """An interval of time, and the requests that ended in it."""

    began: float
    ended: float
    records: Records

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.ended - self.began

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.records.ended) / self.seconds

    @property
    def latency(self) -> float:
        """Mean latency in seconds; 0 if there was no answer."""
        return float(self.records.latency.mean()) if len(self.records.ended) else 0.0


class Measurement:
    """Cuts records into windows, and decides when the measurement is over."""

    def __init__(self, rule: Rule, now: float) -> None:
        self.windows: list[Window] = []
        self._rule = rule
        self._began = now
        self._records: list[Records] = []
        self._finished = False

    def finish(self, records: Records, now: float) -> None:
        """Add the last records of a load that has ended, and end the last window.

        One that is much shorter than the others is joined to the one before.
        """
        self._finished = True
        last = Window(self._began, now, Records.joined([*self._records, records]))
        if self.windows and last.seconds < self._rule.seconds / 2:
            before = self.windows.pop()
            last = Window(before.began, now, Records.joined([before.records, last.records]))
        self.windows.append(last)

    def add(self, records: Records, now: float) -> bool:
        """Add new records; return whether a window has ended.

        With this call, all requests that ended before ``now`` must have been added; later ones may be included.
        """
        self._records.append(records)
        passed = now - self._began
        if passed < self._rule.seconds:
            return False
        enough = sum(len(each.ended) + len(each.failed) for each in self._records) >= self._rule.fewest
        if not enough and (self._rule.whole or passed < _MAX_EXTENSION * self._rule.seconds):
            return False
        within, later = Records.joined(self._records).split(now)
        self.windows.append(Window(self._began, now, within))
        self._began, self._records = now, [later]
        return True

    @property
    def whole(self) -> bool:
        """True if the load has an end, and the measurement ends with it."""
        return self._rule.whole

    @property
    def stable(self) -> bool:
        """True if the last windows agree, or the load had an end."""
        if self.whole:
            return self._finished
        last = self.last
        return (
            len(last) == AGREEING
            and all(window.rate for window in last)
            and _near([window.rate for window in last], self._rule.percentage)
            and _near([window.latency for window in last], self._rule.percentage)
        )

    @property
    def over(self) -> bool:
        """True if windows agree, the maximum number is reached, a window had no answers, or the load has ended."""
        if self.whole:
            return self._finished
        return self.stable or len(self.windows) >= self._rule.most or any(not each.rate for each in self.windows)

    @property
    def failures(self) -> Counter[str]:
        """Number of failures by reason, in all windows."""
        return Counter(reason for window in self.windows for reason in window.records.reasons)

    @property
    def last(self) -> list[Window]:
        """Windows that the figures are computed over."""
        return self.windows if self._rule.whole else self.windows[-AGREEING:]

    def progress(self, now: float) -> float:
        """Return the completed fraction of the shortest possible measurement, from 0 to 1."""
        current = min(1.0, (now - self._began) / self._rule.seconds)
        return min(1.0, (len(self.windows) + current) / AGREEING)


def _near(values: Sequence[float], percentage: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= mean * percentage / 100 for value in values)


# Objectives for single requests, and the figures of a measurement.

MEASURES = {
    "latency": "until the answer is complete",
    "ttft": "until its first token",
    "itl": "between two tokens, on average over an answer",
}
"""Measures that objectives can bound, all in milliseconds."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An answer is good if its ``measure`` is at most ``milliseconds``."""

    measure: str
    milliseconds: float

    def met(self, records: Records) -> Array:
        """Return for each answer whether it meets the objective."""
        met: Array = measured(records, self.measure) * 1e3 <= self.milliseconds
        return met


def measured(records: Records, measure: str) -> Array:
    """Return a measure for each answer in seconds. Answers that are not streamed count as a single part."""
    if measure == "latency":
        return records.latency
    if not records.streamed:
        return records.latency if measure == "ttft" else np.zeros(len(records.ended))
    if measure == "ttft":
        return records.first - records.due
    between: Array = (records.last - records.first) / np.maximum(records.tokens - 1, 1)
    return between


def good(records: Records, objectives: tuple[Objective, ...]) -> int:
    """Return the number of answers that meet all objectives."""
    met = np.ones(len(records.ended), bool)
    for objective in objectives:
        met &= objective.met(records)
    return int(met.sum())


QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a time in milliseconds."""

    mean: float
    deviation: float
    least: float
    most: float
    quantiles: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Array) -> Spread:
        """Summarise a non-empty array of times."""
        ms = seconds * 1e3
        values = np.quantile(ms, list(QUANTILES.values()), method="inverted_cdf")
        found = dict(zip(QUANTILES, values.tolist(), strict=True))
        return cls(float(ms.mean()), float(ms.std()), float(ms.min()), float(ms.max()), found)

    def __getitem__(self, quantile: str) -> float:
        return self.quantiles[quantile]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Figures of streamed answers."""

    first: Spread
    """Time from a request's scheduled time to its first token."""
    between: Spread | None
    """Mean time between the tokens of an answer: a value for each answer of more than one token."""
    gaps: Spread | None
    """Time between two consecutive parts of an answer: a value for each pair."""
    rate: float
    """Tokens per second, over all answers."""
    mean: float
    """Mean number of tokens per answer."""
    prompt: float = 0.0
    """Mean number of tokens per prompt; 0 if the server does not report them."""
    cached: float = 0.0
    """Fraction of the tokens of prompts that the server had in its cache."""


class Part(NamedTuple):
    """Figures of the answers of one model or adapter."""

    answered: int
    latency: Spread
    first: Spread | None
    """Time to the first token; None if answers are not streamed."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over several windows."""

    seconds: float
    answered: int
    rate: float
    """Answers per second."""
    failed: int
    failures: Mapping[str, int]
    latency: Spread
    lag: Spread
    """Delay from a request's scheduled time to its sending."""
    tokens: Tokens | None
    goodput: float | None
    """Answers per second that meet all objectives; None without objectives."""
    latencies: Array = field(repr=False, default_factory=lambda: np.empty(0))
    """Evenly spaced quantiles of the latency in milliseconds, for a plot."""
    cancelled: int = 0
    """Number of requests that the client cancelled."""
    texts: float | None = None
    """Texts per second, of requests with several texts."""
    parts: Mapping[int, Part] = field(default_factory=dict)
    """Figures by model, if requests are sent to several models or adapters."""


def figures(windows: Sequence[Window], objectives: tuple[Objective, ...] = ()) -> Figures | None:
    """Return the figures over several windows, or None if no request was answered in them."""
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
        cancelled=len(records.cancelled),
        texts=float(records.texts.sum()) / seconds if records.texts.any() else None,
        parts={int(model): _part(records, records.model == model) for model in np.unique(records.model)},
    )


def _part(records: Records, chosen: Array) -> Part:
    first = Spread.of(measured(records, "ttft")[chosen]) if records.streamed else None
    return Part(int(chosen.sum()), Spread.of(records.latency[chosen]), first)


def window_values(window: Window, objectives: tuple[Objective, ...] = ()) -> dict[str, float]:
    """Return the figures of one window by the names that reports use. They tell how much figures vary."""
    found = figures([window], objectives)
    if found is None:
        return {"requests_per_second": 0.0}
    values = {"requests_per_second": found.rate, "mean_latency_ms": found.latency.mean}
    values |= {f"{name}_latency_ms": found.latency[name] for name in ("p50", "p90", "p99")}
    if found.goodput is not None:
        values["good_requests_per_second"] = found.goodput
    if found.texts is not None:
        values["texts_per_second"] = found.texts
    if found.tokens is not None:
        values["tokens_per_second"] = found.tokens.rate
        values |= {f"{name}_time_to_first_ms": found.tokens.first[name] for name in ("p50", "p99")}
        if found.tokens.between is not None:
            values["mean_inter_token_ms"] = found.tokens.between.mean
    return values


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
        prompt=float(records.prompt.mean()) if len(records.prompt) else 0.0,
        cached=float(records.cached.sum() / max(records.prompt.sum(), 1)),
    )


# Instructions for generators: what to send where, and at which load.

BenchProtocol = Literal["http", "grpc", "openai"]
Arrivals = Literal["constant", "poisson", "gamma", "replay"]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Server under test, and the protocol of the requests."""

    protocol: BenchProtocol
    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each request."""
    timeout: float = 60.0
    """Seconds after which a request is abandoned."""

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of connections, or None for plain text."""
        if not self.address.tls:
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2" if self.protocol == "grpc" else "http/1.1"])
        return context


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything that is the same for all levels of load."""

    target: BenchTarget
    scripts: Scripts
    """Source of the requests to send."""
    streaming: bool = False
    """Answers are streamed."""
    decoupled: bool = False
    """The model is decoupled and marks its last response."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes that were chosen because the user gave none for inputs with variable dimensions."""
    schedule: tuple[float, ...] = ()
    """Recorded times at which requests are sent; empty without a recording."""
    speed: float = 1.0
    """Factor by which recorded times are shortened."""
    ramp: float = 0.0
    """Seconds in which a load grows to its level."""
    budget: int | None = None
    """Number of requests or conversations after which the load ends; None if it has no end."""
    seed: int = 0
    models: tuple[str, ...] = ()
    """Names of the models and adapters that ``Records.model`` counts."""
    per_arrival: float = 1.0
    """Mean number of requests that follow from one arrival: the turns of a conversation."""

    @property
    def finite(self) -> bool:
        """True if the load has an end."""
        return self.budget is not None or bool(self.schedule)

    @property
    def expected(self) -> float:
        """Expected number of requests of a load that has an end; 0 without an end."""
        return (self.budget or len(self.schedule)) * self.per_arrival


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A level of load: either a number of concurrent requests (closed loop), or a rate per second (open loop)."""

    concurrency: int = 0
    rate: float = 0.0
    arrivals: Arrivals = "constant"
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps between arrivals."""

    @property
    def open(self) -> bool:
        """True for an open loop, which sends requests regardless of answers."""
        return self.rate > 0

    @property
    def kind(self) -> str:
        """Kind of load: rate or concurrency."""
        return "rate" if self.open else "concurrency"

    @property
    def value(self) -> float:
        """Number of the level: its rate or concurrency."""
        return self.rate if self.open else self.concurrency

    def __str__(self) -> str:
        if self.arrivals == "replay":
            return f"{self.rate:.3g}/s"
        return f"{self.rate:g}/s" if self.open else f"{self.concurrency}"
