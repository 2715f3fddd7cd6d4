"""How long requests take, stage by stage, as histograms: sums cannot tell how the slowest of them fare.

A note is two look-ups: the magnitude of a time leads to the one bound that it may lie on either side of, as bounds are
a factor of two apart, or more. Sums and counts are with ``statistics`` in any case.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.observability.distribution import Exemplar

_BOUNDS_NS: Final = tuple(step * 10**power // 10 for power in range(4, 11) for step in (10, 25, 50))
BOUNDS: Final = tuple(bound / 1e9 for bound in _BOUNDS_NS)
"""Seconds: 10 us, 25 us, 50 us, 100 us, and so on up to 50 s."""


def _places(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield for each length in bits the place of the smallest such number, and the bound that larger ones may exceed.

    Then their place is the next.
    """
    for bits in range(64):
        place = bisect_left(bounds, (1 << bits) >> 1)
        yield place, bounds[place] if place < len(bounds) else 1 << 64


_PLACES: Final = tuple(_places(_BOUNDS_NS))


class StageTimes:
    """Those of the requests to one model version that succeeded: for each stage, how many took up to which bound."""

    __slots__ = ("compute_infer", "compute_input", "compute_output", "exemplars", "queue", "whole")

    def __init__(self) -> None:
        self.whole, self.queue, self.compute_input, self.compute_infer, self.compute_output = (
            [0] * (len(_BOUNDS_NS) + 1) for _ in range(5)
        )
        self.exemplars: dict[int, Exemplar] = {}
        """Of ``whole``: by place, the last request that was traced."""

    def ran(self, batch: Sequence[InferenceRequest], marks: Marks, now: int) -> None:
        """Note a batch that ran, each of whose requests waited for all of it."""
        places, whole, queue = _PLACES, self.whole, self.queue
        started = marks.started_ns
        for request in batch:
            ns = now - request.arrived_ns
            place, bound = places[ns.bit_length()]
            whole[place if ns <= bound else place + 1] += 1
            ns = started - request.queued_ns
            place, bound = places[ns.bit_length()]
            queue[place if ns <= bound else place + 1] += 1
        size = len(batch)
        ns = marks.inputs_ready_ns - started
        place, bound = places[ns.bit_length()]
        self.compute_input[place if ns <= bound else place + 1] += size
        ns = marks.computed_ns - marks.inputs_ready_ns
        place, bound = places[ns.bit_length()]
        self.compute_infer[place if ns <= bound else place + 1] += size
        ns = marks.ended_ns - marks.computed_ns
        place, bound = places[ns.bit_length()]
        self.compute_output[place if ns <= bound else place + 1] += size

    def took(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Note ``count`` requests of which each took these times."""
        self.found(whole, queue, count)
        self.compute_input[_place(before)] += count
        self.compute_infer[_place(during)] += count
        self.compute_output[_place(after)] += count

    def traced(self, whole: int, trace_id: int, at: int) -> None:
        """Note where there is more about a request that took ``whole``, until ``at`` in nanoseconds of the time of day.

        It is counted in any case. This may come from another thread than the rest.
        """
        self.exemplars[_place(whole)] = Exemplar(trace_id, whole / 1e9, at / 1e9)

    def found(self, whole: int, queue: int, count: int = 1) -> None:
        """Note ``count`` requests that were answered, and for which nothing was computed."""
        self.whole[_place(whole)] += count
        self.queue[_place(queue)] += count


def _place(ns: int) -> int:
    return bisect_left(_BOUNDS_NS, ns)
