"""Histograms, quantiles, and the times of requests by stage. The reader accumulates; counting is a short search."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest


class Exemplar(NamedTuple):
    """One of the values of a histogram, with the trace of its request."""

    trace_id: int
    value: float
    at: float
    """Seconds since the epoch."""


_NONE: Final[Mapping[int, Exemplar]] = MappingProxyType({})


class Histogram:
    """Number of values in each bucket."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` ascend; values above the last one have a bucket of their own."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values by the first bound that they do not exceed."""
        self.total = 0.0
        self.exemplars = _NONE
        """Exemplars by index of the bucket."""

    @classmethod
    def of(
        cls, bounds: Sequence[float], counts: list[int], total: float, exemplars: Mapping[int, Exemplar] = _NONE
    ) -> Histogram:
        """Return a histogram of counts that the caller owns, without copying them."""
        made = cls.__new__(cls)
        made.bounds, made.counts, made.total, made.exemplars = bounds, counts, total, exemplars
        return made

    def note(self, value: float, count: int = 1) -> None:
        """Count a value that occurred ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def coarser(self, bounds: Sequence[float]) -> Histogram:
        """Return the histogram with a subset of its bounds."""
        made = Histogram(bounds)
        made.total = self.total
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            made.counts[bisect_left(bounds, bound)] += count
        return made


def quantile_of(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return a quantile of values that are counted by bucket, as Prometheus estimates it; NaN if there are none.

    ``counts`` has one number for each bound, and one for the values above the last bound.
    """
    rank = share * sum(counts)
    passed = 0
    for place, count in enumerate(counts):
        if count and passed + count >= rank:
            if place == len(bounds):
                return bounds[-1]
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (rank - passed) / count
        passed += count
    return math.nan


def one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, and so on up to ``most``."""
    bounds: list[float] = []
    decade = 1
    while decade <= most:
        bounds += [step * decade for step in (1, 2, 5) if step * decade <= most]
        decade *= 10
    return bounds


SLICE_NS: Final = 12_000_000_000
_SLICES: Final = 5
_BITS: Final = 8


class QuantileSum(NamedTuple):
    """Value of a summary."""

    events: int
    total: float
    quantiles: Sequence[tuple[float, float]]
    """Quantiles with their values; NaN if nothing was counted in the last minute."""


class Quantiles:
    """Quantiles of the last minute of one quantity, in whole numbers, for Triton's summaries.

    A value is counted with its eight leading bits, so that memory does not grow with the number of values. Ranks are
    exact and values have an error of at most 0.4 %, which is within any error that ``summary_quantiles`` allows.
    """

    __slots__ = ("slices",)

    def __init__(self) -> None:
        self.slices: dict[int, Counter[int]] = {}
        """Counts of each time slice, by its number."""

    def note(self, value: int, now: int, count: int = 1) -> None:
        """Count a value that occurred ``count`` times."""
        place = now // SLICE_NS
        counts = self.slices.get(place)
        if counts is None:
            counts = self.slices[place] = Counter()
            self._forget(now)
        lost = max(value.bit_length() - _BITS, 0)
        counts[(value >> lost << lost) + (1 << lost >> 1)] += count

    def read(self, wanted: Sequence[float], now: int) -> list[tuple[float, float]]:
        """Return the value of each quantile."""
        self._forget(now)
        counts: Counter[int] = Counter()
        for each in self.slices.values():
            counts.update(each)
        ranks = [(max(math.ceil(quantile * counts.total()), 1), quantile) for quantile in wanted]
        found = dict.fromkeys(wanted, math.nan)
        passed = 0
        for value, count in sorted(counts.items()):
            for rank, quantile in ranks:
                if passed < rank <= passed + count:
                    found[quantile] = value
            passed += count
        return list(found.items())

    def _forget(self, now: int) -> None:
        oldest = now // SLICE_NS - _SLICES + 1
        for place in [place for place in self.slices if place < oldest]:
            del self.slices[place]


_BOUNDS_NS: Final = tuple(step * 10**power // 10 for power in range(4, 11) for step in (10, 25, 50))
BOUNDS: Final = tuple(bound / 1e9 for bound in _BOUNDS_NS)
"""Seconds: 10 us, 25 us, 50 us, 100 us, and so on up to 50 s."""


def _places(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield for each length in bits the bucket of the smallest such number, and its bound.

    Larger numbers of that length are in this bucket or, if they exceed the bound, in the next.
    """
    for bits in range(64):
        place = bisect_left(bounds, (1 << bits) >> 1)
        yield place, bounds[place] if place < len(bounds) else 1 << 64


_PLACES: Final = tuple(_places(_BOUNDS_NS))


class StageTimes:
    """Histograms of the times of successful requests to one model version, by stage.

    Counting takes two lookups: bounds are at least a factor of two apart, so the length of a time in bits leads to the
    one bound to compare it with. Sums and counts are those of ``VersionStatistics``.
    """

    __slots__ = ("compute_infer", "compute_input", "compute_output", "exemplars", "queue", "whole")

    def __init__(self) -> None:
        self.whole, self.queue, self.compute_input, self.compute_infer, self.compute_output = (
            [0] * (len(_BOUNDS_NS) + 1) for _ in range(5)
        )
        self.exemplars: dict[int, Exemplar] = {}
        """Last traced request of each bucket of ``whole``."""

    def ran(self, batch: Sequence[InferenceRequest], timings: ExecutionTimes, now: int) -> None:
        """Count an executed batch, all of which each of its requests waited for."""
        places, whole, queue = _PLACES, self.whole, self.queue
        started = timings.started_ns
        for request in batch:
            ns = now - request.arrived_ns
            place, bound = places[ns.bit_length()]
            whole[place if ns <= bound else place + 1] += 1
            ns = started - request.queued_ns
            place, bound = places[ns.bit_length()]
            queue[place if ns <= bound else place + 1] += 1
        size = len(batch)
        ns = timings.inputs_ready_ns - started
        place, bound = places[ns.bit_length()]
        self.compute_input[place if ns <= bound else place + 1] += size
        ns = timings.computed_ns - timings.inputs_ready_ns
        place, bound = places[ns.bit_length()]
        self.compute_infer[place if ns <= bound else place + 1] += size
        ns = timings.ended_ns - timings.computed_ns
        place, bound = places[ns.bit_length()]
        self.compute_output[place if ns <= bound else place + 1] += size

    def took(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Count ``count`` requests, each of which took these times."""
        self.found(whole, queue, count)
        self.compute_input[_place(before)] += count
        self.compute_infer[_place(during)] += count
        self.compute_output[_place(after)] += count

    def traced(self, whole: int, trace_id: int, at: int) -> None:
        """Add a traced request that took ``whole`` until ``at``, in nanoseconds since the epoch, as an exemplar.

        The request is counted elsewhere. May be called from another thread than the other methods.
        """
        self.exemplars[_place(whole)] = Exemplar(trace_id, whole / 1e9, at / 1e9)

    def found(self, whole: int, queue: int, count: int = 1) -> None:
        """Count ``count`` requests that were answered without an execution."""
        self.whole[_place(whole)] += count
        self.queue[_place(queue)] += count


def _place(ns: int) -> int:
    return bisect_left(_BOUNDS_NS, ns)
