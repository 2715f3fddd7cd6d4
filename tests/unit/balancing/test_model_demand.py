"""How many requests to each model are under way, on average and with those that wait."""

from __future__ import annotations

import pytest
from pools import SECOND

from nerite.balancing.model_demand import ModelDemand

MS = SECOND // 1000


def test_short_requests_are_not_missed() -> None:
    demand = ModelDemand()
    demand.take(SECOND)
    for number in range(40):
        began = SECOND + number * 20 * MS
        demand.begin("m", began)
        demand.end("m", began + 5 * MS)
    assert demand.take(2 * SECOND) == {"m": pytest.approx(0.2)}
    assert demand.take(3 * SECOND) == {}, "it is idle"


def test_requests_that_last_count_in_each_interval() -> None:
    demand = ModelDemand()
    demand.take(SECOND)
    demand.begin("m", SECOND + 500 * MS)
    demand.begin("m", SECOND + 500 * MS)
    assert demand.take(2 * SECOND) == {"m": pytest.approx(1.0)}
    assert demand.take(3 * SECOND) == {"m": pytest.approx(2.0)}
    demand.end("m", 3 * SECOND)
    assert demand.take(4 * SECOND) == {"m": pytest.approx(1.0)}


def test_a_refused_request_counts_like_one_of_a_second() -> None:
    demand = ModelDemand()
    demand.take(SECOND)
    demand.refused("m", SECOND)
    assert demand.take(3 * SECOND) == {"m": pytest.approx(0.5)}
    assert demand.take(4 * SECOND) == {}
