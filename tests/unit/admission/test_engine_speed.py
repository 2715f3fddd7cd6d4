"""What was measured says how long things take; what is old says nothing."""

from __future__ import annotations

import pytest

from nerite.admission.estimates import EngineSpeed, LengthForecast

MS = 1_000_000
S = 1000 * MS


def test_at_first_nobody_knows() -> None:
    pace = EngineSpeed(0)
    assert (pace.work(1, 0), pace.prefill(1, 0), pace.decode(1, 1, 0)) == (None, None, None)


def test_prompts_take_some_time_anyway_and_some_for_each_token() -> None:
    pace = EngineSpeed(0)
    for tokens in (10, 1000, 200, 3000):
        pace.note_prefill(tokens, 20 * MS + tokens * MS // 10, S)
    assert pace.prefill(500, S) == pytest.approx(70 * MS)
    assert pace.prefill(5000, S) == pytest.approx(520 * MS)


def test_from_prompts_that_are_alike_the_worse_is_concluded() -> None:
    pace = EngineSpeed(0)
    for _ in range(3):
        pace.note_prefill(100, 10 * MS, S)
    assert pace.prefill(10, S) == pytest.approx(10 * MS)
    assert pace.prefill(300, S) == pytest.approx(30 * MS)


def test_what_is_left_for_a_prompt_is_what_hardly_any_exceeds() -> None:
    pace = EngineSpeed(0)
    for number in range(1, 101):
        pace.note_prefill(100, (100 if number % 4 else 200) * MS, number * 100 * MS)
    assert pace.prefill(100, 10 * S) == pytest.approx(200 * MS, rel=0.1)
    for number in range(101, 201):
        pace.note_prefill(100, 100 * MS, number * 100 * MS)
    assert pace.prefill(100, 20 * S) == pytest.approx(100 * MS, rel=0.1)


def test_a_longer_prompt_is_never_thought_to_be_quicker() -> None:
    pace = EngineSpeed(0)
    pace.note_prefill(100, 50 * MS, S)
    pace.note_prefill(1000, 10 * MS, S)
    assert (pace.prefill(5000, S) or 0) >= (pace.prefill(10, S) or 0) > 0


def test_tokens_by_how_many_run() -> None:
    pace, now = EngineSpeed(0), 0
    for running, step in ((1, 10 * MS), (16, 40 * MS)):
        pace.note_running(running, now)
        for _ in range(100):
            now += step
            pace.note_generated(running, now)
        now += 300 * MS
        pace.note_running(0, now)
    assert pace.decode(100, 1, now) == pytest.approx(S, rel=0.05)
    assert pace.decode(100, 16, now) == pytest.approx(4 * S, rel=0.1)
    assert pace.decode(100, 60, now) == pace.decode(100, 20, now)


def test_throughput_is_what_is_done_while_somebody_waits() -> None:
    pace, now = EngineSpeed(0), 0
    for waiting, rate in ((False, 10), (True, 100), (False, 10)):
        pace.note_waiting(waiting, now)
        for _ in range(20):
            now += 100 * MS
            pace.note_work(rate, now)
    assert pace.work(500, now) == pytest.approx(S / 2, rel=0.05)


def test_new_measurements_count_more_and_old_ones_do_not_count() -> None:
    pace = EngineSpeed(0)
    for second in range(1, 31):
        pace.note_prefill(100, (S if second <= 10 else 10 * MS), second * S)
    assert (pace.prefill(100, 30 * S) or 0) < 40 * MS
    assert pace.prefill(100, 41 * S) is None


def test_how_long_an_answer_will_be() -> None:
    forecast = LengthForecast()
    assert forecast.expected("a", 500) == 500
    assert [forecast.cautious("a", 500, generated) for generated in (0, 200, 300)] == [256, 400, 500]
    for _ in range(50):
        for length in (80, 120):
            forecast.note("a", length)
    assert forecast.expected("a", 500) == pytest.approx(100, abs=3)
    assert forecast.cautious("a", 500) == pytest.approx(120, abs=5)
    assert forecast.expected("new", 500) == forecast.expected("a", 500)
    assert forecast.expected("a", 50) == forecast.cautious("a", 50) == 50
    assert 300 < forecast.cautious("a", 500, 300) <= 500
    for _ in range(100):
        forecast.note("b", 10)
    assert forecast.expected("b", 500) == 10
    assert forecast.expected("a", 500) == pytest.approx(100, abs=3)
