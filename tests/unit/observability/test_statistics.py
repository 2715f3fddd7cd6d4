"""Counting, with a clock that stands where the test puts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import request
from nerite.core.errors import Cancelled, Internal
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.observability import statistics
from nerite.observability import statistics as module
from nerite.observability.statistics import (
    MAX_RESPONSES,
    Duration,
    RequestOutcome,
    ResponseProgress,
    VersionStatistics,
)

OK = InferenceResponse(ResponseHeader("model", "1", ()))
BAD = InferenceResponse.failed(Internal("bad"))
GIVEN_UP = InferenceResponse.failed(Cancelled("given up"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: 1_000)
    monkeypatch.setattr(module.time, "time_ns", lambda: 1_700_000_000_123_999_999)


def timings(started: int, ready: int, computed: int, ended: int, *, failed: bool = False) -> ExecutionTimes:
    made = ExecutionTimes()
    made.started_ns, made.inputs_ready_ns, made.computed_ns, made.ended_ns = started, ready, computed, ended
    made.failed = failed
    return made


def waited(rows: int, arrived: int, queued: int) -> InferenceRequest:
    asked = request(rows, arrived_ns=arrived)
    asked.queued_ns = queued
    return asked


def show(duration: Duration) -> tuple[int, int]:
    return duration.count, duration.ns


def test_nothing_at_first() -> None:
    of = VersionStatistics()
    assert (of.inference_count, of.execution_count, of.last_inference_ms) == (0, 0, 0)
    durations = (of.success, of.fail, of.queue, of.compute_input, of.compute_infer, of.compute_output)
    assert {show(duration) for duration in durations} == {(0, 0)}
    assert of.failures == dict.fromkeys(RequestOutcome, 0)
    assert of.batches == {}


@pytest.mark.usefixtures("clock")
def test_a_request_that_never_ran() -> None:
    of = VersionStatistics()
    of.failed(RequestOutcome.REJECTED, 400)
    of.failed(RequestOutcome.CANCELED, 900)
    assert show(of.fail) == (2, 600 + 100)
    assert of.failures == {**dict.fromkeys(RequestOutcome, 0), RequestOutcome.REJECTED: 1, RequestOutcome.CANCELED: 1}
    assert (of.execution_count, of.inference_count, of.last_inference_ms, show(of.success)) == (0, 0, 0, (0, 0))


@pytest.mark.usefixtures("clock")
def test_a_batch_that_ran() -> None:
    of = VersionStatistics()
    batch = [waited(2, 100, 110), waited(1, 150, 160)]
    of.executed(batch, timings(200, 230, 300, 310), 400)
    assert (of.inference_count, of.execution_count) == (3, 1)
    assert of.last_inference_ms == 1_700_000_000_123
    assert show(of.success) == (2, 300 + 250)
    assert show(of.queue) == (2, 90 + 40)
    # Each request waited for all of the batch.
    assert show(of.compute_input) == (2, 2 * 30)
    assert show(of.compute_infer) == (2, 2 * 70)
    assert show(of.compute_output) == (2, 2 * 10)
    assert show(of.fail) == (0, 0)
    (size,) = of.batches
    assert size == 3
    by_size = of.batches[3]
    assert [show(each) for each in (by_size.compute_input, by_size.compute_infer, by_size.compute_output)] == [
        (1, 30),
        (1, 70),
        (1, 10),
    ]


@pytest.mark.usefixtures("clock")
def test_batches_by_their_rows() -> None:
    of = VersionStatistics()
    for rows in ([1], [2, 1], [3], [1]):
        of.executed([waited(each, 0, 0) for each in rows], timings(0, 1, 3, 6), 10)
    assert {size: show(batch.compute_infer) for size, batch in of.batches.items()} == {1: (2, 4), 3: (2, 4)}
    assert (of.inference_count, of.execution_count, of.success.count) == (8, 4, 5)


@pytest.mark.usefixtures("clock")
def test_an_execution_that_failed() -> None:
    """As Triton has it: it counts as an execution and as failed requests, and nothing was inferred."""
    of = VersionStatistics()
    of.executed([waited(2, 100, 110), waited(1, 150, 160)], timings(200, 230, 300, 310, failed=True), 400)
    assert (of.inference_count, of.execution_count) == (0, 1)
    assert show(of.fail) == (2, 300 + 250)
    assert of.failures[RequestOutcome.BACKEND] == 2
    assert show(of.success) == (0, 0)
    assert show(of.queue) == (0, 0)
    assert of.last_inference_ms == 1_700_000_000_123


@pytest.mark.usefixtures("clock")
def test_a_worker_that_died() -> None:
    of = VersionStatistics()
    of.executed([waited(2, 100, 110)], None, 400)
    assert (of.inference_count, of.execution_count, of.failures[RequestOutcome.WORKER_DIED]) == (0, 1, 1)
    assert show(of.fail) == (1, 300)
    assert of.batches == {}


def counts(of: VersionStatistics, place: int) -> dict[str, tuple[int, int]]:
    """What was counted of a response, without what was not."""
    told = statistics.statistics_json(of, decoupled=True)["response_stats"][str(place)]
    return {name: (value["count"], value["ns"]) for name, value in told.items() if value["count"]}


def test_responses_by_their_place() -> None:
    of = VersionStatistics()
    first = timings(100, 110, 150, 155)
    asked = waited(1, 0, 0)
    progress = ResponseProgress(first, asked.queued_ns)
    of.responded(asked, OK, progress, first)
    of.responded(asked, BAD, progress, timings(100, 155, 165, 168))
    of.responded(asked, EMPTY, progress, timings(100, 168, 170, 171))
    assert counts(of, 0) == {"compute_infer": (1, 40), "compute_output": (1, 5), "success": (1, 45)}
    assert counts(of, 1) == {"compute_infer": (1, 10), "compute_output": (1, 3), "fail": (1, 13)}
    assert counts(of, 2) == {"compute_infer": (1, 2), "empty_response": (1, 2)}
    assert statistics.statistics_json(of, decoupled=False)["response_stats"] == {}


@pytest.mark.parametrize("last", [EMPTY, BAD, GIVEN_UP])
def test_the_end_of_a_request_that_was_given_up(last: InferenceResponse) -> None:
    of = VersionStatistics()
    asked = waited(1, 0, 0)
    asked.cancel()
    of.responded(asked, last, ResponseProgress(timings(0, 0, 0, 0), asked.queued_ns), timings(100, 110, 150, 155))
    assert counts(of, 0) == {"cancel": (1, 45)}


def test_an_endless_stream_is_counted_in_bounded_memory() -> None:
    of = VersionStatistics()
    progress = ResponseProgress(timings(0, 0, 0, 0), 0)
    for _ in range(MAX_RESPONSES + 10):
        of.responded(waited(1, 0, 0), OK, progress, timings(0, 1, 2, 3))
    assert len(of.responses) == MAX_RESPONSES
    assert counts(of, MAX_RESPONSES - 1)["success"] == (11, 22)


@pytest.mark.usefixtures("clock")
def test_a_request_with_several_responses_counts_at_the_last() -> None:
    of = VersionStatistics()
    asked = waited(2, 50, 60)
    progress = ResponseProgress(timings(100, 110, 150, 155), asked.queued_ns)
    of.ended(asked, EMPTY, progress, timings(100, 400, 500, 505), 520)
    assert (of.inference_count, of.last_inference_ms, of.execution_count) == (2, 1_700_000_000_123, 0)
    durations = (of.success, of.queue, of.compute_input, of.compute_infer, of.compute_output)
    assert [show(each) for each in durations] == [(1, 470), (1, 40), (1, 10), (1, 390), (1, 5)]


@pytest.mark.parametrize(
    ("last", "given_up", "outcome"),
    [
        (BAD, False, RequestOutcome.BACKEND),
        (GIVEN_UP, False, RequestOutcome.CANCELED),
        (EMPTY, True, RequestOutcome.CANCELED),
    ],
)
def test_a_request_that_ended_badly(last: InferenceResponse, given_up: bool, outcome: RequestOutcome) -> None:
    of = VersionStatistics()
    asked = waited(1, 50, 60)
    if given_up:
        asked.cancel()
    of.ended(
        asked, last, ResponseProgress(timings(100, 110, 150, 155), asked.queued_ns), timings(100, 110, 150, 155), 200
    )
    assert (show(of.fail), show(of.success), of.failures[outcome]) == ((1, 150), (0, 0), 1)


def test_a_worker_that_died_between_two_responses() -> None:
    of = VersionStatistics()
    of.ended(waited(1, 50, 60), BAD, None, None, 200)
    assert (show(of.fail), of.failures[RequestOutcome.WORKER_DIED]) == ((1, 150), 1)


@pytest.mark.usefixtures("clock")
def test_an_execution_of_requests_that_count_by_themselves() -> None:
    of = VersionStatistics()
    of.executed([], timings(200, 230, 300, 310), 400, [waited(2, 100, 110), waited(1, 100, 110)])
    assert (of.execution_count, of.inference_count, show(of.success), show(of.queue)) == (1, 0, (0, 0), (0, 0))
    assert show(of.batches[3].compute_infer) == (1, 70)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("failed"), st.sampled_from(list(RequestOutcome))),
        st.tuples(st.sampled_from(["ran", "raised", "died"]), st.lists(st.integers(1, 4), min_size=1, max_size=4)),
    ),
    max_size=20,
)


@given(EVENTS)
def test_every_request_counts_once(events: list[tuple[str, object]]) -> None:
    of = VersionStatistics()
    requests = inferences = executions = 0
    for event, argument in events:
        if isinstance(argument, RequestOutcome):
            of.failed(argument, 0)
            requests += 1
            continue
        assert isinstance(argument, list)
        batch = [waited(rows, 0, 0) for rows in argument]
        times = None if event == "died" else timings(0, 0, 0, 0, failed=event == "raised")
        of.executed(batch, times, 0)
        requests += len(batch)
        executions += 1
        inferences += sum(argument) if event == "ran" else 0
    assert of.success.count + of.fail.count == requests
    assert sum(of.failures.values()) == of.fail.count
    assert (of.execution_count, of.inference_count) == (executions, inferences)
    assert of.queue.count == of.compute_infer.count == of.success.count
