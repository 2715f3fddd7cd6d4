"""Until when those that wait can be in time: whoever waits no more is forgotten."""

from __future__ import annotations

from nerite.scheduling.tokens.last_moments import LastMoments
from nerite.scheduling.tokens.refusal import Limit
from nerite.scheduling.tokens.ticket import State, Ticket


def waiting() -> Ticket:
    ticket = Ticket("a", 1)
    ticket.state = State.WAITING
    return ticket


def test_the_first_one_comes_first() -> None:
    moments = LastMoments()
    early, late, gone = waiting(), waiting(), waiting()
    moments.add(late, [(30, Limit.DEADLINE)], 1)
    moments.add(gone, [(5, Limit.DEADLINE)], 2)
    moments.add(early, [(20, Limit.FIRST_TOKEN), (25, Limit.DEADLINE)], 3)
    gone.state = State.RUNNING
    assert moments.next() == 20
    assert list(moments.over(19)) == []
    assert list(moments.over(25)) == [(early, Limit.FIRST_TOKEN), (early, Limit.DEADLINE)]
    assert moments.next() == 30
    late.state = State.OVER
    assert moments.next() is None


def test_one_that_is_refused_meanwhile_is_not_told_again() -> None:
    moments = LastMoments()
    ticket = waiting()
    moments.add(ticket, [(1, Limit.FIRST_TOKEN), (2, Limit.DEADLINE)], 1)
    for each, _ in (told := moments.over(5)):
        each.state = State.OVER
        assert list(told) == []


def test_those_that_are_gone_take_no_room() -> None:
    moments = LastMoments()
    for number in range(10_000):
        ticket = waiting()
        moments.add(ticket, [(1_000_000 - number, Limit.DEADLINE)], 1)
        ticket.state = State.OVER
    assert len(moments._entries) < 100
