"""Latency thresholds: quantiles of the baseline's earlier requests, frozen before the requests that they are for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from nerite.judge.confidence import bucket_at, bucket_of, upper_edge
from nerite.judge.outcome import Outcome, Stratum

_NEEDED: Final = 3
"""Values that are expected above a threshold, in what it is computed from."""
_FIRST: Final = 128
_UNKNOWN: Final = "unknown"
_ENOUGH: Final = 1000
"""Requests after which older ones begin to be forgotten."""
_MAX_STRATA: Final = 64

Histogram = dict[int, float]
Frozen = dict[Stratum, tuple[float, ...]]


def _wider(stratum: Stratum) -> Iterable[Stratum]:
    """Return the classes that a stratum's threshold is taken from, the narrowest that has enough values.

    Cached and uncached requests are never mixed: a candidate with a cold cache would look slow.
    """
    yield stratum
    yield Stratum(stratum.prompt, stratum.cached, "", stratum.stream)
    yield Stratum("", stratum.cached, "", stratum.stream)


class BaselineThresholds:
    """Thresholds by stratum and (field of an ``Outcome``, quantile).

    They are computed anew from the baseline's requests at the end of each window, older ones counting for half each,
    and until there are enough whenever the requests have doubled. A request is held to those in force when it began.
    """

    def __init__(self, learned: Sequence[tuple[str, float]]) -> None:
        self.learned = tuple(learned)
        self._fields = tuple(sorted({field for field, _ in learned}))
        self._indices = tuple(Outcome._fields.index(field) for field in self._fields)
        self._seen: dict[Stratum, tuple[Histogram, ...]] = {}
        self._requests = self._fresh = 0
        self._next = _FIRST
        self._frozen: Frozen = {}
        self._before: Frozen = {}
        self._since_ns = 0

    def learn(self, outcome: Outcome) -> None:
        """Take a request of the baseline that was answered, or that took too long to be."""
        histograms = self._seen.get(outcome.stratum)
        if histograms is None:
            stratum = outcome.stratum if len(self._seen) < _MAX_STRATA else list(_wider(outcome.stratum))[-1]
            histograms = self._seen.setdefault(stratum, tuple({} for _ in self._fields))
        for index, histogram in zip(self._indices, histograms, strict=True):
            value: float = outcome[index]  # type: ignore[assignment]
            if value > 0.0:
                bucket = bucket_of(value)
                histogram[bucket] = histogram.get(bucket, 0) + 1
        self._requests += 1
        self._fresh += 1
        if self._requests >= self._next:
            self._next *= 2
            self._freeze(outcome.at_ns)

    def end_window(self, now_ns: int) -> None:
        """Compute the thresholds anew, and let what was seen count for half from now on, if there is enough of it."""
        if self._requests:
            self._freeze(now_ns)
        if self._fresh < _ENOUGH:
            return
        self._next = sys.maxsize
        self._fresh = 0
        for histograms in self._seen.values():
            for histogram in histograms:
                halves = {bucket: count / 2 for bucket, count in histogram.items() if count >= 0.25}
                histogram.clear()
                histogram.update(halves)

    def _freeze(self, now_ns: int) -> None:
        merged: dict[Stratum, tuple[Histogram, ...]] = {}
        for stratum, histograms in self._seen.items():
            for wider in dict.fromkeys(_wider(stratum)):
                into = merged.setdefault(wider, tuple({} for _ in self._fields))
                for histogram, values in zip(into, histograms, strict=True):
                    for bucket, count in values.items():
                        histogram[bucket] = histogram.get(bucket, 0) + count
        quantiles = {
            (stratum, field): values
            for stratum, histograms in merged.items()
            for field, values in zip(self._fields, histograms, strict=True)
        }
        self._before = self._frozen
        self._frozen = {
            stratum: tuple(self._threshold(quantiles, stratum, *pair) for pair in self.learned) for stratum in merged
        }
        for stream in (False, True):
            classes = [values for stratum, values in self._frozen.items() if stratum.stream is stream]
            if classes:
                self._frozen[Stratum("", _UNKNOWN, "", stream)] = tuple(map(_greatest, zip(*classes, strict=True)))
        self._since_ns = now_ns

    @staticmethod
    def _threshold(seen: dict[tuple[Stratum, str], Histogram], stratum: Stratum, field: str, quantile: float) -> float:
        for wider in _wider(stratum):
            histogram = seen[wider, field]
            count = sum(histogram.values())
            if count * (1 - quantile) >= _NEEDED:
                return upper_edge(bucket_at(histogram, math.ceil(count * quantile)))
        return math.nan

    def of(self, stratum: Stratum, began_ns: float) -> tuple[float, ...] | None:
        """Return the thresholds of a request that began then, in the order of ``learned``; NaN, None: unknown.

        Whether a prompt was cached may not be known before its first token: until then its threshold is the greatest.
        """
        frozen = self._frozen if began_ns >= self._since_ns else self._before
        found = frozen.get(stratum)
        if found is None and frozen:
            found = next((frozen[wider] for wider in _wider(stratum) if wider in frozen), None)
            if found is None and not stratum.cached:
                found = frozen.get(Stratum("", _UNKNOWN, "", stratum.stream))
        return found

    def known(self, index: int) -> bool:
        """Return whether one of ``learned`` has a threshold in any class."""
        return any(values[index] == values[index] for values in self._frozen.values())

    def to_json(self, now_ns: int) -> dict[str, Any]:
        """Return the state, with times relative to ``now_ns``."""
        return {
            "seen": [[key, [list(each.items()) for each in values]] for key, values in self._seen.items()],
            "requests": [self._requests, self._fresh],
            "next": self._next,
            "frozen": [[key, [_json(value) for value in values]] for key, values in self._frozen.items()],
            "before": [[key, [_json(value) for value in values]] for key, values in self._before.items()],
            "age_ns": now_ns - self._since_ns,
        }

    def restore(self, state: dict[str, Any], now_ns: int) -> None:
        """Take a state that ``to_json`` has returned."""
        self._seen = {
            Stratum(*key): tuple({int(bucket): count for bucket, count in each} for each in values)
            for key, values in state["seen"]
        }
        self._requests, self._fresh = (int(each) for each in state["requests"])
        self._next = int(state["next"])
        self._frozen = {Stratum(*key): tuple(map(_number, values)) for key, values in state["frozen"]}
        self._before = {Stratum(*key): tuple(map(_number, values)) for key, values in state["before"]}
        self._since_ns = now_ns - int(state["age_ns"])


def _greatest(values: tuple[float, ...]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
