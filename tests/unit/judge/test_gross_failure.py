from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import fisher_exact

from nerite.judge.limits import GrossFailure, fisher


@pytest.mark.parametrize("table", [(10, 20, 0, 20), (0, 20, 5, 20), (3, 20, 30, 2000), (20, 20, 1980, 1980)])
def test_fisher(table: tuple[int, int, int, int]) -> None:
    bad, requests, others_bad, others = table
    wanted = fisher_exact([[bad, requests - bad], [others_bad, others - others_bad]], "greater").pvalue
    assert fisher(*table) == pytest.approx(wanted)


def told(rule: GrossFailure, candidate: list[bool], others: list[bool]) -> str:
    for failed in others:
        rule.observe(False, failed, 0)
    for failed in candidate:
        rule.observe(True, failed, 0)
    return rule.reason


def test_half_of_the_first_twenty() -> None:
    reason = told(GrossFailure(0.005), [True, False] * 10, [False] * 20)
    assert reason == "10 of the first 20 requests to the candidate failed, and 0 of 20 to the baseline"


@pytest.mark.parametrize(
    ("candidate", "others"),
    [
        ([True] * 19, [False] * 200),  # not yet twenty
        ([True] * 9 + [False] * 11, [False] * 200),  # not half
        ([True] * 12 + [False] * 8, [True] * 12 + [False] * 8),  # like the baseline
        ([True] * 20, []),  # nothing to compare with
        ([False] * 20 + [True] * 20, [False] * 20),  # not the first
    ],
)
def test_what_is_no_gross_failure(candidate: list[bool], others: list[bool]) -> None:
    assert told(GrossFailure(0.005), candidate, others) == ""


def test_each_step_is_looked_at_and_no_more_than_six() -> None:
    rule = GrossFailure(0.005)
    for _ in range(5):
        assert told(rule, [False] * 20, [False] * 20) == ""
        rule.begin_step()
    assert told(rule, [True] * 20, [False] * 20)
    rule = GrossFailure(0.005)
    for _ in range(6):
        told(rule, [False] * 20, [False] * 20)
        rule.begin_step()
    assert told(rule, [True] * 20, [False] * 20) == ""


def test_one_key_is_one_request() -> None:
    rule = GrossFailure(0.005)
    for _ in range(100):
        rule.observe(True, True, 5)
        rule.observe(False, False, 0)
    assert rule.reason == ""


def test_equal_arms_seldom_differ_so() -> None:
    random = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        failed = random.random(40) < random.random()
        found += bool(told(GrossFailure(0.06), failed[:20].tolist(), failed[20:].tolist()))
    assert found <= 2000 * 0.01 + 3 * (2000 * 0.01) ** 0.5
