from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from nerite.tools.bench.measurement import Measurement, Objective, Records, Rule, Window, figures, window_values

RULE = Rule(seconds=1.0, fewest=5, percentage=10.0, most=6)


def answers(ended: Iterable[float], latency: float = 0.1) -> Records:
    times = np.array(list(ended))
    return Records(times - latency, times - latency, times)


def steady(begin: float, rate: int, latency: float = 0.1) -> Records:
    return answers(np.linspace(begin, begin + 1, rate, endpoint=False), latency)


def test_three_windows_that_agree_are_enough() -> None:
    measurement = Measurement(RULE, 0.0)
    for second, rate in enumerate((50, 100, 100, 105)):
        assert not measurement.over
        assert measurement.add(steady(second, rate), second + 1.0)
    assert measurement.stable
    assert [window.rate for window in measurement.last] == [100, 100, 105]


@pytest.mark.parametrize("rates, latencies", [((100, 100, 130), (1, 1, 1)), ((100, 100, 100), (0.1, 0.1, 0.15))])
def test_windows_that_differ_do_not(rates: tuple[int, ...], latencies: tuple[float, ...]) -> None:
    measurement = Measurement(RULE, 0.0)
    for second, (rate, latency) in enumerate(zip(rates, latencies, strict=True)):
        measurement.add(steady(second, rate, latency), second + 1.0)
    assert not measurement.stable
    assert not measurement.over


def test_it_is_over_after_so_many_windows() -> None:
    measurement = Measurement(RULE, 0.0)
    for second in range(6):
        assert not measurement.over
        measurement.add(steady(second, 100 * (second + 1)), second + 1.0)
    assert measurement.over
    assert not measurement.stable


def test_a_window_with_few_answers_goes_on_but_not_for_ever() -> None:
    measurement = Measurement(RULE, 0.0)
    assert not measurement.add(answers([0.5, 0.6]), 1.0)
    assert measurement.add(answers([1.5, 1.6, 1.7]), 2.0)
    assert measurement.windows[0].seconds == 2.0
    assert not measurement.add(answers([3.0]), 11.9)
    assert measurement.add(answers([]), 12.0)


def test_what_ends_after_a_window_is_in_the_next() -> None:
    measurement = Measurement(RULE, 0.0)
    assert measurement.add(answers([0.1, 0.2, 0.3, 0.4, 1.01]), 1.0)
    assert measurement.add(answers([1.2, 1.3, 1.4, 1.5]), 2.0)
    assert [len(window.records.ended) for window in measurement.windows] == [4, 5]


def test_where_nothing_is_answered_it_is_over_at_once() -> None:
    measurement = Measurement(RULE, 0.0)
    failed = Records(failed=np.linspace(0, 0.9, 10), reasons=["400: no"] * 10)
    assert measurement.add(failed, 1.0)
    assert measurement.over
    assert measurement.failures == {"400: no": 10}


def test_the_parts_of_answers_stay_with_them() -> None:
    records = Records(
        due=np.zeros(3),
        sent=np.zeros(3),
        ended=np.array([3.0, 1.0, 2.0]),
        first=np.array([0.5, 1.0, 0.2]),
        last=np.array([2.5, 1.0, 1.2]),
        parts=np.array([3.0, 1.0, 2.0]),
        tokens=np.array([5.0, 1.0, 2.0]),
        gaps=np.array([1.5, 0.5, 1.0]),
    )
    before, after = records.split(2.5)
    assert before.gaps.tolist() == [1.0]
    assert after.gaps.tolist() == [1.5, 0.5]
    found = figures([Window(0.0, 4.0, records)], (Objective("ttft", 600), Objective("itl", 550)))
    assert found is not None and found.tokens is not None and found.tokens.between is not None
    assert found.tokens.rate == 2.0
    # The last two tokens of the first answer came 500 ms apart on average, those of the third 1000 ms.
    assert found.tokens.between.most == 1000
    assert found.tokens.gaps is not None and found.tokens.gaps["p99"] == 1500
    assert found.goodput == 0.25


def test_figures_of_whole_answers() -> None:
    records = answers(np.arange(1, 101) / 10, 0.1)
    records.due = records.ended - np.arange(1, 101) / 1000
    found = figures([Window(0.0, 10.05, records)], (Objective("latency", 50),))
    assert found is not None
    assert found.latency["p50"] == pytest.approx(50)
    assert found.latency["p99"] == pytest.approx(99)
    assert found.latency.most == pytest.approx(100)
    assert found.rate == pytest.approx(100 / 10.05)
    assert found.goodput == pytest.approx(50 / 10.05, abs=0.2)
    assert found.tokens is None
    assert figures([Window(0.0, 1.0, Records())]) is None


def test_a_load_that_has_an_end_is_measured_as_a_whole() -> None:
    measurement = Measurement(Rule(seconds=1.0, fewest=5, whole=True), 0.0)
    for second, rate in enumerate((50, 10, 90)):
        assert measurement.add(steady(second, rate), second + 1.0)
        assert not measurement.over
    measurement.finish(answers([3.1, 3.2]), 3.25)
    assert measurement.over and measurement.stable
    # What is left is too short for a window of its own.
    assert [window.seconds for window in measurement.last] == [1, 1, 1.25]
    found = figures(measurement.last)
    assert found is not None and found.answered == 152 and found.seconds == 3.25


def test_a_short_load_is_one_window() -> None:
    measurement = Measurement(Rule(seconds=1.0, whole=True), 0.0)
    assert not measurement.add(answers([0.1]), 20.0)
    measurement.finish(answers([20.1]), 20.5)
    assert [len(window.records.ended) for window in measurement.last] == [2]


def test_cancelled_requests_are_counted_apart() -> None:
    measurement = Measurement(RULE, 0.0)
    records = steady(0, 50)
    records.cancelled = np.array([0.2, 0.4, 1.2])
    assert measurement.add(records, 1.0)
    found = figures(measurement.windows)
    assert found is not None and (found.answered, found.cancelled, found.failed) == (50, 2, 0)
    assert measurement.add(steady(1, 50), 2.0)
    assert len(measurement.windows[1].records.cancelled) == 1


def test_figures_by_model_and_of_texts() -> None:
    records = answers([0.1, 0.2, 0.3, 0.4], latency=0.05)
    records.model, records.texts = np.array([0.0, 1.0, 1.0, 1.0]), np.array([8.0, 8.0, 8.0, 8.0])
    found = figures([Window(0.0, 2.0, records)])
    assert found is not None and found.texts == 16
    assert {place: part.answered for place, part in found.parts.items()} == {0: 1, 1: 3}
    assert found.parts[1].latency["p50"] == pytest.approx(50) and found.parts[1].first is None


def test_windows_have_the_figures_of_reports() -> None:
    values = window_values(Window(0.0, 1.0, steady(0, 50)), (Objective("latency", 200),))
    assert values["requests_per_second"] == values["good_requests_per_second"] == 50
    assert values["p99_latency_ms"] == pytest.approx(100)
    assert window_values(Window(0.0, 1.0, answers([]))) == {"requests_per_second": 0.0}
