"""Until when those that wait can be in time: whoever waits no more is forgotten."""

from __future__ import annotations

from weakref import WeakSet

from nerite.admission.deadlines import LatestStarts
from nerite.admission.refusals import QuotaLimit
from nerite.admission.ticket import AdmissionTicket, TicketState


class Ticket(AdmissionTicket):
    """One to which there can be weak references."""


def waiting() -> Ticket:
    ticket = Ticket("a", 1)
    ticket.state = TicketState.WAITING
    return ticket


def test_the_first_one_comes_first() -> None:
    moments = LatestStarts()
    early, late, gone = waiting(), waiting(), waiting()
    moments.add(late, [(30, QuotaLimit.DEADLINE)], 1)
    moments.add(gone, [(5, QuotaLimit.DEADLINE)], 2)
    moments.add(early, [(20, QuotaLimit.FIRST_TOKEN), (25, QuotaLimit.DEADLINE)], 3)
    gone.state = TicketState.RUNNING
    assert moments.next() == 20
    assert list(moments.over(19)) == []
    assert list(moments.over(25)) == [(early, QuotaLimit.FIRST_TOKEN), (early, QuotaLimit.DEADLINE)]
    assert moments.next() == 30
    late.state = TicketState.OVER
    assert moments.next() is None


def test_one_that_is_refused_meanwhile_is_not_told_again() -> None:
    moments = LatestStarts()
    ticket = waiting()
    moments.add(ticket, [(1, QuotaLimit.FIRST_TOKEN), (2, QuotaLimit.DEADLINE)], 1)
    for each, _ in (told := moments.over(5)):
        each.state = TicketState.OVER
        assert list(told) == []


def test_those_that_are_gone_take_no_room() -> None:
    moments, kept = LatestStarts(), WeakSet[Ticket]()
    for number in range(10_000):
        ticket = waiting()
        kept.add(ticket)
        moments.add(ticket, [(1_000_000 - number, QuotaLimit.DEADLINE)], 1)
        ticket.state = TicketState.OVER
    assert len(kept) < 100
