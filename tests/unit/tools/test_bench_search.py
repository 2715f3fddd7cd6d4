from __future__ import annotations

import numpy as np
import pytest

from nerite.tools.bench.measurement import Figures, LoadLevel, Spread
from nerite.tools.bench.session import LatencyLimit, LevelOutcome, Search


def outcome(level: LoadLevel, milliseconds: float, *, rate: float = 0.0, failed: int = 0) -> LevelOutcome:
    spread = Spread.of(np.full(10, milliseconds / 1e3))
    shown = Figures(1.0, 10, rate or level.rate, failed, {}, spread, spread, None, None)
    return LevelOutcome(level, shown, (), True, None, 0.0, 0.0)


def searched(highest: float, lowest: LoadLevel, most: LoadLevel) -> tuple[float, int]:
    """The load that is found, and after how many measurements, of a server that can do ``highest``."""
    search = Search(LatencyLimit("p99", 20), lowest, most)
    for count in range(100):
        if search.next is None:
            return (search.best.level.value if search.best else 0.0), count
        level = search.next
        assert lowest.value <= level.value <= most.value
        search.add(outcome(level, 10 if level.value <= highest else 30))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("highest", [1, 2, 3, 17, 63])
def test_a_number_of_requests_under_way_is_found_exactly_where_it_is_small(highest: int) -> None:
    found, _ = searched(highest, LoadLevel(concurrency=1), LoadLevel(concurrency=64))
    assert highest / 1.05 <= found <= highest


@pytest.mark.parametrize("highest", [100.5, 830, 4_900])
def test_a_rate_is_found_to_a_twentieth(highest: float) -> None:
    found, measured = searched(highest, LoadLevel(rate=100), LoadLevel(rate=5_000))
    assert highest / 1.05 <= found <= highest
    assert measured <= 9


def test_the_ends() -> None:
    assert searched(1_000, LoadLevel(rate=100), LoadLevel(rate=500)) == (500, 2)
    assert searched(10, LoadLevel(rate=100), LoadLevel(rate=500)) == (0, 1)


def test_what_is_within_a_limit() -> None:
    limit, level = LatencyLimit("p99", 20), LoadLevel(rate=100)
    assert limit.met_by(outcome(level, 20))
    assert not limit.met_by(outcome(level, 20, rate=90))
    assert not limit.met_by(outcome(level, 20, failed=1))
    assert LatencyLimit("mean", 20).met_by(outcome(LoadLevel(concurrency=2), 20, rate=5))


def test_arrivals_stay_as_they_are() -> None:
    search = Search(
        LatencyLimit("p50", 20), LoadLevel(rate=1, arrivals="poisson"), LoadLevel(rate=4, arrivals="poisson")
    )
    for milliseconds in (10.0, 30.0):
        assert search.next is not None
        search.add(outcome(search.next, milliseconds))
    assert search.next == LoadLevel(rate=2, arrivals="poisson")
