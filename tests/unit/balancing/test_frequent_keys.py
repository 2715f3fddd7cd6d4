"""Shares of keys among the latest requests."""

from __future__ import annotations

import random

import pytest

from nerite.balancing.frequent_keys import FrequentKeys


def test_a_few_requests_do_not_make_a_share() -> None:
    keys = FrequentKeys()
    assert [round(keys.add(1), 2) for _ in range(3)] == [0.03, 0.06, 0.09]


def test_a_share_is_found_among_keys_that_never_return() -> None:
    keys = FrequentKeys()
    shares = [(keys.add(0), keys.add(number))[0] for number in range(1, 5000)]
    assert min(shares[1000:]) > 0.4
    assert max(shares) <= 0.5


def test_what_is_no_longer_asked_for_loses_its_share() -> None:
    keys = FrequentKeys()
    for _ in range(2000):
        keys.add(1)
    for _ in range(3000):
        keys.add(2)
    assert keys.add(1) < 0.05
    assert keys.add(2) > 0.8


def test_shares_are_right_within_the_bound() -> None:
    chance = random.Random(7)
    keys = FrequentKeys()
    found = {}
    for _ in range(20_000):
        key = 1 if chance.random() < 0.3 else chance.randrange(2, 1_000_000)
        found[key] = keys.add(key)
    assert found[1] == pytest.approx(0.3, abs=0.08)
    assert sum(share > 0.05 for share in found.values()) == 1
