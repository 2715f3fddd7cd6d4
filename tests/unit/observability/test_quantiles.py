"""Quantiles of the last minute: right ranks, values that are nearly right, and nothing that is older."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nerite.observability.histogram import SLICE_NS, Quantiles

WANTED = (0.5, 0.9, 0.99)


def test_nothing_is_not_a_number() -> None:
    assert all(math.isnan(value) for _, value in Quantiles().read(WANTED, 0))


def test_small_values_are_exact() -> None:
    of = Quantiles()
    for value in range(1, 101):
        of.note(value, 0)
    assert of.read(WANTED, 0) == [(0.5, 50), (0.9, 90), (0.99, 99)]


@given(st.lists(st.integers(0, 10**9), min_size=1), st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]))
def test_a_quantile_has_its_rank_and_nearly_its_value(values: list[int], quantile: float) -> None:
    of = Quantiles()
    for value in values:
        of.note(value, 0)
    ((_, found),) = of.read([quantile], 0)
    right = sorted(values)[max(math.ceil(quantile * len(values)), 1) - 1]
    assert abs(found - right) <= right / 256


def test_what_is_older_than_a_minute_does_not_count() -> None:
    of = Quantiles()
    of.note(1_000, 0, count=100)
    of.note(7, 3 * SLICE_NS)
    assert of.read([0.5], 4 * SLICE_NS)[0][1] > 990
    assert of.read([0.5], 5 * SLICE_NS) == [(0.5, 7)]
    assert math.isnan(of.read([0.5], 9 * SLICE_NS)[0][1])


def test_what_is_kept_does_not_grow_with_the_requests() -> None:
    of = Quantiles()
    for value in range(0, 10_000_000, 97):
        of.note(value, 0)
    assert sum(len(each) for each in of.slices.values()) < 256 * 24
