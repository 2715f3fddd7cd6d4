"""The idle class: admitted where nobody waits and room is left, never queued, stopped for others, and then not paid."""

from __future__ import annotations

import pytest

from nerite.admission.accounts import Accounts
from nerite.admission.controller import AdmissionController
from nerite.admission.policy import IDLE, AdmissionPolicy, ModelLimits, RateLimit, Tenant, parse_policy
from nerite.admission.refusals import QuotaLimit
from nerite.admission.ticket import AdmissionTicket, Admit, Refuse, TicketEnding, TicketState, Wait
from nerite.core.errors import InvalidArgument, NoIdleRoom


class Engine:
    """The gate of an engine that runs 8 sequences."""

    def __init__(self, *, tokens: bool = True) -> None:
        tenant = Tenant("acme", input_tokens=RateLimit(60, 1000), output_tokens=RateLimit(60, 1000))
        limits = ModelLimits(tokens=tokens, max_running=8)
        policy = AdmissionPolicy(tenants={"acme": tenant}, llms={"*": limits}, models={"*": limits})
        self.accounts = Accounts(policy)
        self.gate = AdmissionController("llm", self.accounts, 0, tokens=tokens)

    def offer(self, wanted: str = "") -> tuple[AdmissionTicket, object]:
        ticket = AdmissionTicket("acme", 10, 10, wanted_class=wanted)
        return ticket, self.gate.offer(ticket, 0)

    def fill(self) -> list[AdmissionTicket]:
        """Have all room that is idle used."""
        admitted = []
        while (offered := self.offer(IDLE.name))[1] == Admit():
            admitted.append(offered[0])
        return admitted

    def left(self, limit: QuotaLimit) -> float:
        standing = self.accounts.of("acme", 0).standing(0)
        return next(rate.left for rate in standing.rates if rate.limit == limit)


def test_one_place_of_eight_is_left_free() -> None:
    engine = Engine()
    assert len(engine.fill()) == 7
    assert engine.offer()[1] == Admit()


def test_it_is_refused_and_not_queued() -> None:
    engine = Engine()
    engine.fill()
    ticket, decision = engine.offer(IDLE.name)
    assert isinstance(decision, Refuse)
    assert decision.refusal.limit == QuotaLimit.IDLE_ROOM
    assert isinstance(decision.refusal.as_error(), NoIdleRoom)
    assert ticket.state is TicketState.OVER
    assert engine.gate.waiting == 0


def test_it_is_not_admitted_while_others_wait() -> None:
    engine = Engine()
    running = [engine.offer()[0] for _ in range(8)]
    waiting, decision = engine.offer()
    assert decision == Wait()
    for ticket in running[:4]:
        engine.gate.finished(ticket, TicketEnding.COMPLETE, 0)
    assert isinstance(engine.offer(IDLE.name)[1], Refuse)  # ``due`` has not admitted the other one yet
    assert engine.gate.due(0).admitted == [waiting]
    assert engine.offer(IDLE.name)[1] == Admit()


def test_the_newest_is_preempted_for_each_that_waits() -> None:
    engine = Engine()
    idle = engine.fill()
    engine.offer()
    assert engine.gate.preempt() == []
    waiting, decision = engine.offer()
    assert decision == Wait()
    (stopped,) = engine.gate.preempt()
    assert stopped is idle[-1]
    assert engine.gate.preempt() == []
    engine.gate.finished(stopped, TicketEnding.CANCELLED, 0)
    assert engine.gate.preempt() == []
    assert engine.gate.due(0).admitted == [waiting]


def test_raised_requests_are_not_preempted() -> None:
    engine = Engine()
    for _ in range(9):
        engine.offer()
    assert engine.gate.preempt() == []


def test_nothing_is_preempted_while_no_engine_is_up() -> None:
    engine = Engine()
    engine.fill()
    engine.gate.set_ready(False, 0)
    engine.offer()
    assert engine.gate.preempt() == []


def test_models_other_than_llms_are_not_interrupted() -> None:
    engine = Engine(tokens=False)
    engine.fill()
    engine.offer()
    engine.offer()
    assert engine.gate.preempt() == []


def test_what_was_preempted_is_refunded_and_counted_as_wasted() -> None:
    engine = Engine()
    before = {limit: engine.left(limit) for limit in (QuotaLimit.INPUT_RATE, QuotaLimit.OUTPUT_RATE)}
    idle = engine.fill()
    last = idle.pop()
    engine.gate.started(last, 0)
    engine.gate.progressed(last, 3, 0)
    paid = {limit: engine.left(limit) for limit in before}
    engine.offer()
    engine.offer()
    assert engine.gate.preempt() == [last]
    engine.gate.progressed(last, 1, 0)
    engine.gate.finished(last, TicketEnding.CANCELLED, 0)
    assert engine.gate.usage.of("acme", IDLE.name).wasted_tokens == 4
    for ticket in idle:
        engine.gate.finished(ticket, TicketEnding.FAILED, 0)
    assert all(engine.left(limit) > paid[limit] for limit in before)
    assert engine.left(QuotaLimit.INPUT_RATE) == before[QuotaLimit.INPUT_RATE] - 2 * 10


def test_every_tenant_may_select_it_and_no_policy_may_define_it() -> None:
    policy = parse_policy("[classes.high]\norder = 1\n[default]\nclass = 'high'")
    assert policy.class_of(policy.everybody, IDLE.name) is IDLE
    with pytest.raises(InvalidArgument, match=r"policy:1: classes\.idle: is reserved"):
        parse_policy("[classes.idle]\norder = 1")
