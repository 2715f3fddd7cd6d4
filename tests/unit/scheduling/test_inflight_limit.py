"""How many requests of a step may be under way: who waits, who begins, and who does not wait any longer."""

from __future__ import annotations

from nerite.scheduling.ensemble import GIVES_WAY_NS, InflightLimit


def test_first_come_first_served() -> None:
    limit = InflightLimit[str](2)
    assert [limit.enter(who, 0) for who in "abcd"] == [True, True, False, False]
    assert limit.waiting == 2
    assert limit.leave() == "c"
    assert limit.leave() == "d"
    assert limit.leave() is None
    assert limit.enter("e", 0)


def test_nobody_overtakes() -> None:
    limit = InflightLimit[str](1)
    limit.enter("a", 0)
    limit.enter("b", 0)
    assert limit.leave() == "b"
    assert not limit.enter("c", 0)


def test_who_waits_too_long_begins() -> None:
    limit = InflightLimit[str](1)
    limit.enter("a", 0)
    assert limit.wake_at() is None
    limit.enter("b", 5)
    limit.enter("c", 9)
    assert limit.wake_at() == GIVES_WAY_NS + 5
    assert limit.overdue(GIVES_WAY_NS + 4) == []
    assert limit.overdue(GIVES_WAY_NS + 5) == ["b"]
    assert limit.waiting == 1
    assert limit.leave() is None, "there is one more under way than may be"
    assert limit.leave() == "c"


def test_who_gives_up_does_not_wait() -> None:
    limit = InflightLimit[str](1)
    for who in "abc":
        limit.enter(who, 0)
    limit.withdraw(lambda who: who == "b")
    assert limit.leave() == "c"
