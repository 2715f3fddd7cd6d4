"""KV blocks: what is promised is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.admission.estimates import EngineStatistics, KvHeadroom, KvReservation


def told(total: int = 100, free: int = 100, overcommit: float = 0.0) -> KvHeadroom:
    headroom = KvHeadroom(overcommit)
    headroom.tell(EngineStatistics(total, free, 16))
    return headroom


def test_as_long_as_the_engine_says_nothing_there_are_no_bounds() -> None:
    headroom = KvHeadroom()
    assert headroom.fits(headroom.blocks(10**9))


def test_what_is_promised_is_gone() -> None:
    headroom = told()
    assert headroom.blocks(33) == 3
    holding = headroom.promise(60)
    assert headroom.fits(40)
    assert not headroom.fits(41)
    headroom.release(holding)
    assert headroom.fits(100)


def test_what_the_engine_says_counts_with_what_it_does_not_know_yet() -> None:
    headroom = told()
    holding = headroom.promise(50)
    headroom.hold(holding, 20)
    headroom.tell(EngineStatistics(100, 70, 16))
    assert headroom.left == 40
    headroom.promise(10)
    assert headroom.left == 30
    headroom.hold(holding, 50)
    headroom.tell(EngineStatistics(100, 45, 16))
    assert headroom.left == 35


def test_blocks_that_somebody_else_has_are_not_given_away() -> None:
    headroom = told(free=30)
    assert headroom.fits(30)
    assert not headroom.fits(31)


def test_shared_blocks_do_not_come_free() -> None:
    headroom = told()
    holding = headroom.promise(10)
    holding.shared = 4
    headroom.release(holding)
    assert headroom.left == 96


def test_a_stated_part_may_be_promised_beyond() -> None:
    headroom = told(overcommit=0.1)
    assert headroom.fits(110)
    assert not headroom.fits(111)
    headroom.change(0.0)
    assert not headroom.fits(101)


@pytest.mark.parametrize("overcommit", [0.0, 0.25])
@given(data=st.data())
def test_never_more_is_promised_than_may_be(overcommit: float, data: st.DataObject) -> None:
    headroom, there = told(overcommit=overcommit), list[KvReservation]()
    for act in data.draw(st.lists(st.sampled_from(["ask", "leave", "grow", "tell"]), max_size=60)):
        if act == "ask" and headroom.fits(blocks := data.draw(st.integers(1, 60))):
            there.append(headroom.promise(blocks))
        elif act == "leave" and there:
            headroom.release(there.pop(data.draw(st.integers(0, len(there) - 1))))
        elif act == "grow" and there:
            holding = data.draw(st.sampled_from(there))
            headroom.hold(holding, data.draw(st.integers(holding.held, holding.promised)))
        elif act == "tell":
            headroom.tell(EngineStatistics(100, max(0, 100 - sum(each.held for each in there)), 16))
        promised = sum(each.promised for each in there)
        assert promised == headroom.promised <= headroom.limit == int(100 * (1 + overcommit))
