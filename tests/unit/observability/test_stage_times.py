"""Histograms of times: each is where a search in the bounds would put it."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from doubles import request
from nerite.core.execution_observer import ExecutionTimes
from nerite.observability.histogram import BOUNDS, StageTimes
from nerite.observability.statistics import VersionStatistics

EDGES = [round(bound * 1e9) for bound in BOUNDS]
TIMES = st.integers(0, 10**12) | st.sampled_from(EDGES) | st.sampled_from([edge + 1 for edge in EDGES])


def test_the_bounds_are_round() -> None:
    assert [*BOUNDS[:7]] == [1e-05, 2.5e-05, 5e-05, 1e-04, 2.5e-04, 5e-04, 1e-03]
    assert BOUNDS[-1] == 50


def one(ns: int) -> list[int]:
    counts = [0] * (len(BOUNDS) + 1)
    counts[bisect_left(EDGES, ns)] = 1
    return counts


def noted(of: StageTimes) -> list[list[int]]:
    return [of.whole, of.queue, of.compute_input, of.compute_infer, of.compute_output]


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_a_note_is_where_a_search_would_put_it(whole: int, queue: int, before: int, during: int, after: int) -> None:
    base = 10**13
    timings = ExecutionTimes()
    timings.started_ns = base
    timings.inputs_ready_ns = base + before
    timings.computed_ns = timings.inputs_ready_ns + during
    timings.ended_ns = timings.computed_ns + after
    asked = request(arrived_ns=timings.ended_ns - whole)
    asked.queued_ns = base - queue
    by_batch, by_times = StageTimes(), StageTimes()
    by_batch.ran([asked], timings, timings.ended_ns)
    by_times.took(whole, queue, before, during, after)
    assert noted(by_batch) == noted(by_times) == [one(ns) for ns in (whole, queue, before, during, after)]


def test_each_request_of_a_batch_has_its_own_wait_and_all_of_the_execution() -> None:
    timings = ExecutionTimes()
    timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = (
        100_000,
        110_000,
        1_110_000,
        1_110_001,
    )
    first, second = request(arrived_ns=0), request(arrived_ns=90_000)
    first.queued_ns, second.queued_ns = 0, 90_000
    of = VersionStatistics(StageTimes())
    of.executed([first, second], timings, 1_200_000)
    assert of.stages is not None
    places = {bound: place for place, bound in enumerate(EDGES)}
    assert of.stages.queue[places[100_000]] == of.stages.queue[places[10_000]] == 1
    assert of.stages.compute_input[places[10_000]] == 2
    assert of.stages.compute_infer[places[1_000_000]] == 2
    assert of.stages.whole[places[2_500_000]] == 2
    assert all(sum(counts) == 2 for counts in noted(of.stages))
