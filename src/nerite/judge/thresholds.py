"""Latency thresholds: quantiles of the baseline's earlier requests, frozen before the requests that they are for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nerite.judge.latency_counts import Floats, LatencyCounts
from nerite.judge.outcome import Stratum
from nerite.judge.outcome_batch import LATENCIES, OutcomeBatch

_NEEDED: Final = 3
"""Values that are expected above a threshold, in what it is computed from."""
_FIRST: Final = 128
_UNKNOWN: Final = "unknown"
_ENOUGH: Final = 1000
"""Requests after which older ones begin to be forgotten."""
_MAX_STRATA: Final = 64

Seen = dict[Stratum, tuple[LatencyCounts, ...]]
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
        self._rows = tuple(LATENCIES.index(field) for field in self._fields)
        self._seen: Seen = {}
        self._requests = self._fresh = 0
        self._next = _FIRST
        self._frozen: Frozen = {}
        self._before: Frozen = {}
        self._since_ns = 0

    @property
    def room(self) -> int:
        """How many requests may be learned together: thresholds change after the last of them."""
        return max(1, self._next - self._requests)

    def learn(self, batch: OutcomeBatch) -> None:
        """Take the requests of the baseline that were answered, or that took too long to be: ``room`` at most."""
        learned = batch.timed & ~batch.candidate
        count = int(np.count_nonzero(learned))
        if not count:
            return
        groups = dict.fromkeys(batch.group[learned].tolist())  # in the order of their first requests
        for number in groups:
            mine = learned & (batch.group == number) if len(groups) > 1 else learned
            stratum = batch.groups[number][0]
            for row, counts in zip(self._rows, self._seen_of(stratum), strict=True):
                counts.add(batch.buckets_where(row, mine))
        self._requests += count
        self._fresh += count
        if self._requests >= self._next:
            self._next *= 2
            self._freeze(int(batch.at_ns[learned][-1]))

    def _seen_of(self, stratum: Stratum) -> tuple[LatencyCounts, ...]:
        found = self._seen.get(stratum)
        if found is None:
            stratum = stratum if len(self._seen) < _MAX_STRATA else list(_wider(stratum))[-1]
            found = self._seen.setdefault(stratum, tuple(LatencyCounts() for _ in self._fields))
        return found

    def end_window(self, now_ns: int) -> None:
        """Compute the thresholds anew, and let what was seen count for half from now on, if there is enough of it."""
        if self._requests:
            self._freeze(now_ns)
        if self._fresh < _ENOUGH:
            return
        self._next = sys.maxsize
        self._fresh = 0
        for seen in self._seen.values():
            for counts in seen:
                counts.halve()

    def _freeze(self, now_ns: int) -> None:
        merged: Seen = {}
        for stratum, seen in self._seen.items():
            for wider in dict.fromkeys(_wider(stratum)):
                into = merged.setdefault(wider, tuple(LatencyCounts() for _ in self._fields))
                for counts, more in zip(into, seen, strict=True):
                    counts.merge(more)
        self._before = self._frozen
        self._frozen = {
            stratum: tuple(self._threshold(merged, stratum, *pair) for pair in self.learned) for stratum in merged
        }
        for stream in (False, True):
            classes = [values for stratum, values in self._frozen.items() if stratum.stream is stream]
            if classes:
                self._frozen[Stratum("", _UNKNOWN, "", stream)] = tuple(map(_greatest, zip(*classes, strict=True)))
        self._since_ns = now_ns

    def _threshold(self, seen: Seen, stratum: Stratum, field: str, quantile: float) -> float:
        place = self._fields.index(field)
        for wider in _wider(stratum):
            counts = seen[wider][place]
            if counts.total * (1 - quantile) >= _NEEDED:
                return counts.quantile(quantile)
        return math.nan

    def of(self, stratum: Stratum, began_ns: float) -> tuple[float, ...] | None:
        """Return the thresholds of a request that began then, in the order of ``learned``; NaN, None: unknown.

        Whether a prompt was cached may not be known before its first token: until then its threshold is the greatest.
        """
        return self._in(self._frozen if began_ns >= self._since_ns else self._before, stratum)

    @staticmethod
    def _in(frozen: Frozen, stratum: Stratum) -> tuple[float, ...] | None:
        found = frozen.get(stratum)
        if found is None and frozen:
            found = next((frozen[wider] for wider in _wider(stratum) if wider in frozen), None)
            if found is None and not stratum.cached:
                found = frozen.get(Stratum("", _UNKNOWN, "", stratum.stream))
        return found

    def of_all(self, batch: OutcomeBatch) -> Floats:
        """Return the thresholds of requests, as ``of`` does, by request and place; NaN: unknown."""
        unknown = (math.nan,) * len(self.learned)

        def table(frozen: Frozen) -> Floats:
            rows = np.array([self._in(frozen, stratum) or unknown for stratum, _, _ in batch.groups], float)
            return rows.reshape(len(batch.groups), len(unknown))[batch.group]

        found = table(self._frozen)
        earlier = batch.at_ns - batch.latencies[0] * 1000 < self._since_ns
        if earlier.any():
            found = np.where(earlier[:, None], table(self._before), found)
        return found

    @property
    def in_force(self) -> Mapping[Stratum, tuple[float, ...]]:
        """The thresholds by class. Another object whenever they change."""
        return self._frozen

    def known(self, index: int) -> bool:
        """Return whether one of ``learned`` has a threshold in any class."""
        return any(values[index] == values[index] for values in self._frozen.values())

    def to_json(self, now_ns: int) -> dict[str, Any]:
        """Return the state, with times relative to ``now_ns``."""
        return {
            "seen": [[key, [each.to_json() for each in values]] for key, values in self._seen.items()],
            "requests": [self._requests, self._fresh],
            "next": self._next,
            "frozen": [[key, [_json(value) for value in values]] for key, values in self._frozen.items()],
            "before": [[key, [_json(value) for value in values]] for key, values in self._before.items()],
            "age_ns": now_ns - self._since_ns,
        }

    def restore(self, state: dict[str, Any], now_ns: int) -> None:
        """Take a state that ``to_json`` has returned."""
        self._seen = {Stratum(*key): tuple(map(LatencyCounts.of_json, values)) for key, values in state["seen"]}
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
