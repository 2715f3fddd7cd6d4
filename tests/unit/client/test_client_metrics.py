"""A page of metrics, read."""

from __future__ import annotations

import math

import pytest

from nerite.client.models import MetricsPage, quantile

PAGE = MetricsPage(
    "\n".join(
        [
            "# HELP seen Requests",
            "# TYPE seen counter",
            'seen{model="a",version="1"} 3',
            'seen{model="a",version="2"} 4',
            'seen{model="b \\"x\\\\\\n",version="1"} 5e2',
            "alone 0.5",
            'took_bucket{model="a",le="0.1"} 1 # {trace_id="ab"} 0.05 1700000000',
            'took_bucket{model="a",le="0.5"} 3',
            'took_bucket{model="a",le="+Inf"} 4',
            "no sample at all",
        ]
    )
)


def test_samples() -> None:
    assert [value for _, value in PAGE.samples("seen")] == [3, 4, 500]
    assert [labels["model"] for labels, _ in PAGE.samples("seen")][-1] == 'b "x\\\n'
    assert (PAGE.total("seen"), PAGE.total("seen", model="a"), PAGE.total("seen", model="a", version="2")) == (
        507,
        7,
        4,
    )
    assert (PAGE.total("alone"), PAGE.total("alone", model="a"), PAGE.total("nowhere")) == (0.5, None, None)


def test_buckets() -> None:
    assert PAGE.buckets("took", model="a") == {0.1: 1, 0.5: 3, math.inf: 4}
    assert PAGE.buckets("took", model="b") == {}


@pytest.mark.parametrize(
    ("part", "expected"),
    [(0.25, 0.1), (0.5, 0.3), (0.75, 0.5), (0.99, 0.5), (0.125, 0.05)],
)
def test_quantiles(part: float, expected: float) -> None:
    assert quantile(PAGE.buckets("took"), part) == pytest.approx(expected)


def test_no_quantile_of_nothing() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0, math.inf: 0}, 0.5) is None
