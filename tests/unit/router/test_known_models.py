"""Which models a pool serves, which its members know, and which requests may wait for one that serves them."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.balancing.member import Member, RoutedRequest
from nerite.cluster.settings import MemberSource, PlacementSettings, PoolSettings
from nerite.core.errors import NeriteError
from nerite.router.pools import MemberIndex, PoolTable, RouterPool


def made(*members: str, **keys: Any) -> RouterPool:
    pool = RouterPool(PoolSettings("p", MemberSource(), **keys))
    find(pool, *members)
    return pool


def find(pool: RouterPool, *members: str) -> None:
    pool.set_members([Member(each, f"{each}:80") for each in members])


def status(pool: RouterPool, model: str) -> int:
    """Return the status of the error for a request to a model."""
    found = PoolTable([pool]).choose(RoutedRequest(model), "", 1)
    assert isinstance(found, NeriteError)
    return found.http_status


def test_requests_wait_where_waiting_makes_sense() -> None:
    assert not made("a").may_come_to_serve("m"), "not by default"
    assert made("a", placement=PlacementSettings()).may_come_to_serve("m")
    assert made("a", hold_requests=1).may_come_to_serve("m")
    assert not made("a", hold_requests=0, placement=PlacementSettings()).may_come_to_serve("m")


def test_models_of_members_that_are_not_ready_are_known() -> None:
    pool = made("a", "b", hold_requests=1)
    pool.set_ready("a", True, ("m",))
    pool.set_ready("b", True, ("n",))
    pool.set_ready("a", False)
    assert (pool.models, pool.known) == ({"n"}, {"m", "n"})
    assert pool.may_come_to_serve("m")
    assert not pool.may_come_to_serve("other")


def test_what_members_knew_is_remembered_until_others_say_what_they_know() -> None:
    pool = made("a", hold_requests=1)
    pool.set_ready("a", True, ("m",))
    find(pool)
    assert pool.may_come_to_serve("m")
    find(pool, "b")
    assert pool.may_come_to_serve("m")
    pool.set_ready("b", True, ("n",))
    assert not pool.may_come_to_serve("m")


def test_a_model_that_members_could_load_is_known() -> None:
    pool = made("a", placement=PlacementSettings())
    pool.set_ready("a", True, ("m",), MemberIndex(frozenset("mn"), frozenset("m")))
    assert pool.may_come_to_serve("n")
    assert [status(pool, model) for model in ("n", "unheard")] == [503, 404]


def test_a_copy_that_is_about_to_be_unloaded_gets_no_requests() -> None:
    pool = made("a", placement=PlacementSettings())
    index = MemberIndex(frozenset("m"), frozenset("m"))
    pool.set_ready("a", True, ("m",), index)
    pool.withhold("a", "m")
    pool.set_ready("a", True, ("m",), index)
    assert not pool.serves("m")
    assert pool.known == {"m"}
    pool.give_back("a", "m")
    pool.set_ready("a", True, ("m",), index)
    assert pool.serves("m")


@pytest.mark.parametrize("models", [None, ("m", "n")])
def test_a_doubt_lasts_until_the_next_check(models: tuple[str, ...] | None) -> None:
    pool = made("a")
    pool.set_ready("a", True, models)
    pool.doubt("a", "m")
    assert pool.serves("m") == (models is None)
    assert pool.serves("n")
    pool.set_ready("a", True, models)
    assert pool.serves("m")


def test_an_obstacle_is_over_at_its_time() -> None:
    pool = made("a")
    pool.obstacles["m"] = ("its load has failed", 50)
    assert pool.obstacle_to("m", 49) == ("its load has failed", 50)
    assert pool.obstacle_to("m", 50) == ("", 0)
    pool.obstacles["m"] = ("no room", 0)
    assert pool.obstacle_to("m", 50) == ("no room", 0)
