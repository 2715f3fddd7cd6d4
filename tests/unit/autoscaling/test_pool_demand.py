"""Which answers keep the promises of a pool, and what is counted from one second to the next."""

from __future__ import annotations

import pytest

from nerite.autoscaling.figures import PoolDemand, PromiseCount
from nerite.autoscaling.policy import ScalingPolicy


@pytest.mark.parametrize(
    ("seconds", "first", "tokens", "late"),
    [
        (1.9, 0.4, 11.0, 0),
        (2.1, 0.4, 21.0, 1),
        (1.0, 0.6, 11.0, 1),
        (1.9, 0.1, 11.0, 1),
        (1.9, 1.9, 0.0, 0),
        (0.4, 0.4, 1.0, 0),
    ],
    ids=["kept", "latency", "ttft", "itl", "an answer without tokens has no first", "a single token has no next"],
)
def test_an_answer_that_breaks_any_promise_is_late(seconds: float, first: float, tokens: float, late: int) -> None:
    count = PromiseCount(ScalingPolicy(ttft=0.5, itl=0.16, latency=2.0))
    count.answered(seconds, first, tokens)
    assert (count.answers, count.late) == (1, late)


def test_figures_are_those_since_they_were_taken_last() -> None:
    demand = PoolDemand(ScalingPolicy(latency=1.0))
    demand.arrived, demand.done, demand.turned_away = 5.0, 3.0, 2
    demand.promises.answered(0.5, 0.5, 0.0)
    demand.promises.missed()
    figures = demand.take(1.5, under_way=4, held=1, ready=2)
    assert figures == (1.5, 5.0, 3.0, 2, 1, 4, 1, 2, 2)
    assert not figures.idle
    assert demand.take(1.0, under_way=0, held=0, ready=2).idle
