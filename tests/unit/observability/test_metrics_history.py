"""The samples of an hour: what they say, and that they are bounded."""

from __future__ import annotations

import math

import pytest

from nerite.core.engine_report import EngineReport
from nerite.core.execution_observer import ExecutionTimes
from nerite.observability.histogram import StageTimes, quantile_of
from nerite.observability.metrics_history import (
    INTERVAL,
    LINES,
    SPARKS,
    TOKEN_LINES,
    MetricsHistory,
    VersionReading,
)
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.observability.token_statistics import TokenStatistics

A, B = ("a", "1"), ("b", "1")


class Version:
    """A model version that counts requests of 3 ms each."""

    def __init__(self) -> None:
        self.statistics = VersionStatistics(StageTimes())
        self.tokens: TokenStatistics | None = None
        self.queued = 0

    def answers(self, count: int, rows: int = 0) -> None:
        times = ExecutionTimes()
        times.started_ns, times.inputs_ready_ns, times.computed_ns, times.ended_ns = 0, 1_000_000, 2_000_000, 3_000_000
        if count:
            self.statistics.followed(count, rows or count, times)

    @property
    def reading(self) -> VersionReading:
        return VersionReading(self.statistics, self.tokens, self.queued, self.queued)


class Clock:
    """Takes samples of versions at the interval."""

    def __init__(self, **bounds: int) -> None:
        self.history = MetricsHistory(**bounds)
        self.now = 1000.0

    def take(self, **versions: Version) -> None:
        self.now += INTERVAL
        self.history.begin(self.now, INTERVAL)
        for name, version in versions.items():
            self.history.note((name, "1"), version.reading)
        self.history.end()

    def line(self, name: str, model: str = "a", seconds: float = 3600) -> list[float]:
        found: list[float] = self.history.of_version((model, "1"), seconds)["lines"][name].tolist()
        return found


def test_what_a_sample_says() -> None:
    clock, a = Clock(), Version()
    a.answers(10, rows=40)
    a.statistics.failed(RequestOutcome.REJECTED, 0)
    a.queued = 3
    clock.take(a=a)
    found = clock.history.of_version(A, 3600)
    assert (found["interval"], found["times"].tolist(), tuple(found["lines"])) == (5.0, [1005.0], LINES)
    told = {name: clock.line(name)[0] for name in LINES}
    assert told["requests"] == pytest.approx(11 / INTERVAL)
    assert told["failures"] == pytest.approx(1 / INTERVAL)
    assert told["rows"] == 8
    assert (told["queue"], told["batch"]) == (3, 40)
    assert 0.0025 < told["p50"] < told["p90"] < told["p99"] <= 0.005


def test_a_sample_has_what_came_since_the_last_one() -> None:
    clock, a = Clock(), Version()
    for count in (10, 0, 20):
        a.answers(count)
        clock.take(a=a)
    assert clock.line("requests") == [2, 0, 4]
    assert [math.isnan(value) for value in clock.line("p99")] == [False, True, False]
    assert [math.isnan(value) for value in clock.line("batch")] == [False, True, False]


def test_the_sums_of_all() -> None:
    clock, a, b = Clock(), Version(), Version()
    a.answers(10)
    b.answers(5)
    b.queued = 2
    clock.take(a=a, b=b)
    found = clock.history.of_all(3600)["lines"]
    assert {name: values.tolist() for name, values in found.items()} == {"requests": [3], "failures": [0], "queue": [2]}


def test_only_complete_samples_are_read() -> None:
    clock, a = Clock(), Version()
    a.answers(10)
    clock.take(a=a)
    clock.history.begin(clock.now + INTERVAL, INTERVAL)
    assert clock.history.of_all(3600)["lines"]["requests"].tolist() == [2]


def test_a_version_that_had_no_request_has_no_series() -> None:
    clock = Clock()
    clock.take(a=Version())
    assert list(clock.history.requests(3600)) == []
    assert all(math.isnan(value) for value in clock.line("requests"))


def test_counts_of_a_reloaded_version_begin_at_zero() -> None:
    clock, a = Clock(), Version()
    a.answers(100)
    clock.take(a=a)
    anew = Version()
    anew.answers(10)
    clock.take(a=anew)
    assert clock.line("requests") == [20, 2]


def test_a_version_that_is_gone_has_a_gap() -> None:
    clock, a = Clock(), Version()
    a.answers(10)
    clock.take(a=a)
    clock.take()
    assert clock.line("requests")[0] == 2
    assert math.isnan(clock.line("requests")[1])


def test_the_oldest_samples_are_dropped() -> None:
    clock, a = Clock(samples=3), Version()
    for count in range(5, 30, 5):
        a.answers(count)
        clock.take(a=a)
    assert clock.line("requests") == [3, 4, 5]
    assert clock.line("requests", seconds=2 * INTERVAL) == [4, 5]
    assert clock.history.of_all(0)["times"].tolist() == []


def test_there_are_only_so_many_series() -> None:
    clock, versions = Clock(most=2), {name: Version() for name in "abc"}
    for name, version in versions.items():
        version.answers(50)
        clock.take(**versions)
        kept = [key[0] for key, _ in clock.history.requests(3600)]
        assert len(kept) <= 2 and name in kept
    assert [key[0] for key, _ in clock.history.requests(3600)] == ["b", "c"]
    versions["a"].answers(5)
    clock.take(**versions)
    # It comes back with what is new, not with all since the beginning.
    assert clock.line("requests")[-1] == 0
    versions["a"].answers(5)
    clock.take(**versions)
    assert clock.line("requests")[-1] == 1


def test_a_version_that_was_idle_for_as_long_as_is_kept_is_forgotten() -> None:
    clock, a = Clock(samples=3), Version()
    a.answers(10)
    for _ in range(6):
        clock.take(a=a)
    assert list(clock.history.requests(3600)) == []
    assert clock.line("requests", seconds=INTERVAL) != [0]


def test_the_rates_of_each_version_are_few() -> None:
    clock, a = Clock(), Version()
    for _ in range(2 * SPARKS + 1):
        a.answers(15)
        clock.take(a=a)
    ((key, rates),) = clock.history.requests(3600)
    assert (key, len(rates) <= SPARKS) == (A, True)
    assert set(rates.tolist()[1:]) == {3}
    ((_, rates),) = clock.history.requests(4 * INTERVAL)
    assert rates.tolist() == [3] * 4


def test_the_tokens_of_an_engine() -> None:
    clock, a = Clock(), Version()
    a.answers(1)
    clock.take(a=a)
    a.tokens = TokenStatistics(1000)
    a.tokens.reported("engine", EngineReport(running=3, waiting=1, total_blocks=10, free_blocks=4), 0)
    a.tokens.generated_tokens += 50
    a.tokens.first_token.note(0.03)
    clock.take(a=a)
    assert tuple(clock.history.of_version(A, 3600)["lines"]) == (*LINES, *TOKEN_LINES)
    told = {name: clock.line(name) for name in TOKEN_LINES}
    assert math.isnan(told["running"][0])
    assert (told["running"][1], told["waiting"][1], told["generated_tokens"][1]) == (3, 1, 10)
    assert told["kv_usage"][1] == pytest.approx(0.6)
    assert 0.02 < told["first_token_p50"][1] <= 0.04
    assert math.isnan(told["between_p50"][1])


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([0, 0, 0], 0.5, math.nan),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.25, 1.25),
        ([0, 0, 4], 0.5, 2),
        ([1, 1, 0], 1, 2),
    ],
)
def test_quantiles_of_counts(counts: list[int], share: float, value: float) -> None:
    assert quantile_of([1, 2], counts, share) == pytest.approx(value, nan_ok=True)
