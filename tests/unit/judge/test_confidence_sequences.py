from __future__ import annotations

import math

import numpy as np
import pytest

from nerite.judge.confidence import bucket_of, quantile_interval, rate_interval, upper_edge


def test_a_bucket_contains_its_latencies() -> None:
    for latency in (0.0, 0.5, 1.0, 1.01, 17.0, 1e3, 123_456.0, 1e9):
        bucket = bucket_of(latency)
        assert latency <= upper_edge(bucket) * (1 + 1e-9)
        assert bucket == 0 or latency > upper_edge(bucket - 1) * (1 - 1e-9)


def test_a_rate_without_requests_is_unknown() -> None:
    found = rate_interval(0, 0, 0.05)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0, 1)


def test_the_bounds_of_a_rate_solve_the_equation_of_the_mixture() -> None:
    """Of 2 in 10: the mean likelihood over Beta(1/2, 1/2), divided by that of the bound, is 20."""
    found = rate_interval(2, 10, 0.05)
    # The mean of p^2 (1 - p)^8 over Beta(1/2, 1/2), as products: (1/2 3/2) (1/2 3/2 ... 15/2) / 10!.
    mean = math.prod(n / 2 for n in (1, 3)) * math.prod(n / 2 for n in range(1, 16, 2)) / math.factorial(10)
    for bound in (found.low, found.high):
        assert mean / (bound**2 * (1 - bound) ** 8) == pytest.approx(20, rel=1e-3)
    assert found.low < found.value == 0.2 < found.high


def test_extreme_rates_are_bounded_on_one_side() -> None:
    assert rate_interval(0, 100, 0.05).low == 0
    assert rate_interval(0, 100, 0.05).high < 0.1
    assert rate_interval(100, 100, 0.05).high == 1


def test_a_rate_is_inside_at_all_times() -> None:
    random = np.random.default_rng(1)
    outside = 0
    for _ in range(200):
        hits = (random.random(300) < 0.1).cumsum()
        bounds = [rate_interval(int(hits[n]), n + 1, 0.1) for n in range(0, 300, 10)]
        outside += any(not each.low <= 0.1 <= each.high for each in bounds)
    assert outside <= 20


def test_a_quantile_is_inside_at_all_times() -> None:
    random = np.random.default_rng(2)
    true = math.exp(8 + 0.5 * 1.2815516)
    outside = 0
    for _ in range(100):
        counts: dict[int, float] = {}
        for number, latency in enumerate(np.exp(random.normal(8, 0.5, 400)), 1):
            bucket = bucket_of(latency)
            counts[bucket] = counts.get(bucket, 0) + 1
            if number % 20 == 0:
                found = quantile_interval(counts, 0.9, 0.1)
                if not found.low <= true <= found.high:
                    outside += 1
                    break
    assert outside <= 10


def test_few_values_bound_a_quantile_on_one_side_at_most() -> None:
    found = quantile_interval({bucket_of(1000): 5}, 0.99, 0.05)
    assert found.high == math.inf
    assert math.isnan(quantile_interval({}, 0.99, 0.05).value)
    many = quantile_interval({bucket_of(1000): 100_000, bucket_of(5000): 5_000}, 0.5, 0.05)
    assert many.low < 1000 < many.high * 1.02 < 1100
