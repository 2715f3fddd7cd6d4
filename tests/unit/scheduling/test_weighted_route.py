"""Weighted routes: shares of coins and keys, what a change of weights moves, and what is no route."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest

from nerite.config.sticky_key import KeySource, StickyKey
from nerite.core.errors import InvalidArgument
from nerite.scheduling.weighted_route import ArmChoice, RouteArm, WeightedRoute

KEYS = [f"user:{number}".encode() for number in range(100_000)]
READY = (True, True)


def route(*weights: float, salt: str = "") -> WeightedRoute:
    return WeightedRoute("m", tuple(RouteArm("m", str(n), weight) for n, weight in enumerate(weights, 1)), salt=salt)


def by_key(of: WeightedRoute, keys: list[bytes] = KEYS) -> list[int]:
    choice = ArmChoice(of, [True] * len(of.arms))
    return [choice.by_key(key) for key in keys]


@pytest.mark.parametrize("weights", [(90, 10), (1, 1), (75, 25), (50, 30, 20), (99, 1)])
def test_weights_hold_within_one_percent_of_100_000_requests(weights: tuple[float, ...]) -> None:
    of, coins = route(*weights), random.Random(7)
    choice = ArmChoice(of, [True] * len(weights))
    for counts in (Counter(by_key(of)), Counter(choice.by_coin(coins.random()) for _ in range(100_000))):
        for index, weight in enumerate(weights):
            assert abs(counts[index] / 100_000 - weight / sum(weights)) < 0.01
    assert choice.probability == pytest.approx(weights[-1] / sum(weights))


def test_only_keys_of_the_share_that_moves_move() -> None:
    before, after = by_key(route(90, 10)), by_key(route(75, 25))
    moved = Counter((old, new) for old, new in zip(before, after, strict=True) if old != new)
    assert set(moved) == {(0, 1)}
    assert abs(moved[0, 1] / len(KEYS) - 0.15) < 0.01


def test_an_arm_that_leaves_moves_only_its_own_keys() -> None:
    of = route(40, 40, 20)
    before, choice = by_key(of), ArmChoice(of, (True, False, True))
    assert all(choice.by_key(key) == old for key, old in zip(KEYS, before, strict=True) if old != 1)


def test_another_process_assigns_keys_alike() -> None:
    """Python's own hash of a text differs between processes."""
    program = (
        "from nerite.scheduling.weighted_route import *\n"
        "of = WeightedRoute('m', (RouteArm('m', '1', 70), RouteArm('m', '2', 30)))\n"
        "print([ArmChoice(of, (True, True)).by_key(b'user:%d' % n) for n in range(200)])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert ran.stdout.strip() == str(by_key(route(70, 30), KEYS[:200]))


def test_salts_are_independent() -> None:
    one, other = by_key(route(50, 50, salt="a"), KEYS[:20_000]), by_key(route(50, 50, salt="b"), KEYS[:20_000])
    assert abs(sum(a == b for a, b in zip(one, other, strict=True)) / 20_000 - 0.5) < 0.02


def test_an_arm_that_is_not_ready_or_has_no_weight_gets_nothing() -> None:
    choice = ArmChoice(route(90, 10), (False, True))
    assert {choice.by_key(key) for key in KEYS[:100]} == {1} == {choice.by_coin(n / 100) for n in range(100)}
    assert choice.probability == 1
    choice = ArmChoice(route(90, 0), READY)
    assert {choice.by_key(key) for key in KEYS[:100]} == {0}
    assert choice.probability == 0


def test_the_last_coin_has_an_arm() -> None:
    """Shares may add up to slightly less than 1."""
    choice = ArmChoice(route(*[0.1] * 10), [True] * 10)
    assert choice.by_coin(1 - 2**-53) == 9


@pytest.mark.parametrize("text", ["header:X-User", "parameter:user", "tenant", "idempotency-key", "user", "prompt:256"])
def test_a_key_is_written_as_it_is_read(text: str) -> None:
    assert str(StickyKey.parse(text)) == text.lower()


def test_names_of_headers_have_no_case_and_those_of_parameters_have() -> None:
    assert StickyKey.parse("header:X-User") == StickyKey(KeySource.HEADER, "x-user")
    assert StickyKey.parse("parameter:X-User") == StickyKey(KeySource.PARAMETER, "X-User")


@pytest.mark.parametrize(
    "text", ["", "cookie:a", "header", "header:", "tenant:a", "prompt", "prompt:0", "prompt:65537"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot be a sticky key.*Use header:NAME"):
        StickyKey.parse(text)


@pytest.mark.parametrize(
    ("arms", "why"),
    [
        ((), "0 arms"),
        ((RouteArm("m", "1"),) * 2, "twice"),
        ((RouteArm("m", "1", -1),), "not between"),
        ((RouteArm("m", "1", float("nan")),), "not between"),
        ((RouteArm("m", "1", 0),), "weight 0"),
        ((RouteArm("m", "one"),), "not a version number"),
        ((RouteArm("m"), RouteArm("m", "2")), "the route itself"),
        ((RouteArm(""),), "without a model"),
        (tuple(RouteArm("m", str(n)) for n in range(1, 18)), "17 arms"),
    ],
)
def test_what_is_no_route_is_refused(arms: tuple[RouteArm, ...], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        WeightedRoute("m", arms)


def test_the_last_arm_is_the_candidate() -> None:
    assert route(90, 10).candidate.label == "m:2"
    assert [arm.weight for arm in route(10, 0, 90).by_weight] == [90, 10]
