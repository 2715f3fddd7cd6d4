"""The gate: who is let in, who waits, and who is refused with which figure."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.admission.accounts import Accounts
from nerite.admission.controller import AdmissionController
from nerite.admission.estimates import EngineStatistics
from nerite.admission.policy import AdmissionPolicy, ModelLimits, PriorityClass, RateLimit, Tenant
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause
from nerite.admission.ticket import AdmissionTicket, Admit, Decision, Refuse, TicketEnding, TicketState, Wait
from nerite.core.errors import DeadlineExceeded, InvalidArgument, Overloaded, QuotaExceeded, TooLarge

MS = 1_000_000
S = 1000 * MS
HIGH, LOW = PriorityClass("high", 1, 3), PriorityClass("low", 2, 1)


def policy(limits: ModelLimits, *tenants: Tenant, high: PriorityClass = HIGH) -> AdmissionPolicy:
    return AdmissionPolicy(
        classes={"high": high, "low": LOW},
        tenants={each.name: each for each in tenants},
        everybody=Tenant(level="high"),
        llms={"*": limits},
        models={"*": dataclasses.replace(limits, tokens=False)},
    )


class House:
    """A gate, its accounts and a clock."""

    def __init__(
        self,
        limits: ModelLimits | None = None,
        *tenants: Tenant,
        high: PriorityClass = HIGH,
        tokens: bool = True,
    ) -> None:
        self.now = 0
        self.accounts = Accounts(policy(limits or ModelLimits(), *tenants, high=high))
        self.gate = AdmissionController("llm", self.accounts, 0, tokens=tokens)

    def offer(self, ticket: AdmissionTicket) -> Decision:
        return self.gate.offer(ticket, self.now)

    def let_in(self, tenant: str = "default", size: int = 10, most: int = 10, **more: str) -> AdmissionTicket:
        ticket = AdmissionTicket(tenant, size, most, **more)
        assert self.offer(ticket) == Admit()
        return ticket

    def wait(self, tenant: str = "default", size: int = 10, most: int = 10, **more: str) -> AdmissionTicket:
        ticket = AdmissionTicket(tenant, size, most, **more)
        assert self.offer(ticket) == Wait()
        return ticket

    def refused(self, ticket: AdmissionTicket | None = None) -> AdmissionRefusal:
        decision = self.offer(ticket or AdmissionTicket("default", 10, 10))
        assert isinstance(decision, Refuse)
        return decision.refusal

    def answer(
        self, ticket: AdmissionTicket, tokens: int, ending: TicketEnding = TicketEnding.COMPLETE, takes: int = 0
    ) -> None:
        self.gate.started(ticket, self.now)
        for _ in range(tokens):
            self.now += takes
            self.gate.progressed(ticket, 1, self.now)
        self.gate.finished(ticket, ending, self.now)

    def admitted(self) -> list[AdmissionTicket]:
        return self.gate.due(self.now).admitted


def test_without_limits_everybody_is_let_in() -> None:
    house = House()
    for _ in range(50):
        house.let_in(size=10_000, most=0)
    assert house.gate.running == 50
    assert house.gate.next_time() is None


@pytest.mark.parametrize(
    ("limits", "size", "most", "limit", "fault", "figures"),
    [
        (ModelLimits(max_input=100), 101, 5, QuotaLimit.MAX_INPUT_TOKENS, RefusalCause.SIZE, (100, 101)),
        (ModelLimits(max_output=100), 10, 101, QuotaLimit.MAX_OUTPUT_TOKENS, RefusalCause.CLIENT, (100, 101)),
        (ModelLimits(context_window=100), 100, 0, QuotaLimit.CONTEXT_WINDOW, RefusalCause.SIZE, (100, 101)),
        (ModelLimits(context_window=100), 60, 41, QuotaLimit.CONTEXT_WINDOW, RefusalCause.CLIENT, (100, 101)),
        (ModelLimits(), 1600, 0, QuotaLimit.KV_BLOCKS, RefusalCause.SIZE, (100, 101)),
    ],
)
def test_what_is_too_large_for_good(
    limits: ModelLimits, size: int, most: int, limit: QuotaLimit, fault: RefusalCause, figures: tuple[int, int]
) -> None:
    house = House(limits)
    house.gate.tell(EngineStatistics(100, 100, 16))
    refusal = house.refused(AdmissionTicket("default", size, most))
    assert (refusal.limit, refusal.fault, (refusal.value, refusal.use)) == (limit, fault, figures)
    error = refusal.as_error()
    assert type(error) is {RefusalCause.SIZE: TooLarge, RefusalCause.CLIENT: InvalidArgument}[fault]
    assert error.retry_after == 0
    assert f"({limit} of model 'llm' is {figures[0]}, now {figures[1]})" in error.message


def test_who_does_not_say_how_much_may_have_what_there_is() -> None:
    house = House(ModelLimits(max_output=50, context_window=100))
    assert (house.let_in(size=20, most=0).most, house.let_in(size=70, most=0).most) == (50, 30)


def test_a_class_above_ones_own_is_refused() -> None:
    house = House(None, Tenant("t", "low"))
    refusal = house.refused(AdmissionTicket("t", 1, 1, wanted_class="high"))
    assert (refusal.limit, refusal.value, refusal.use) == (QuotaLimit.CLASS, "low", "'high'")
    assert house.let_in("default", wanted_class="low").level is LOW


def test_a_rate_that_is_used_up() -> None:
    house = House(None, Tenant("t", "high", input_tokens=RateLimit(60, 100)))
    house.let_in("t", size=90)
    refusal = house.refused(AdmissionTicket("t", 20, 1))
    assert (refusal.limit, refusal.value, refusal.use, refusal.retry_after) == (
        QuotaLimit.INPUT_RATE,
        60,
        "10 left of 100",
        10,
    )
    error = refusal.as_error()
    assert type(error) is QuotaExceeded
    assert error.message == (
        "the request needs 20 (input_tokens_per_minute of tenant 't' is 60, now 10 left of 100). Try again in 10 s."
    )
    house.let_in("default", size=1000)
    house.now = 10 * S
    house.let_in("t", size=20)
    assert house.refused(AdmissionTicket("t", 101, 1)).retry_after is None


def test_of_several_rates_the_slowest_is_named() -> None:
    house = House(None, Tenant("t", "high", input_tokens=RateLimit(60, 60), requests=RateLimit(1, 1)))
    house.let_in("t", size=60)
    assert (house.refused(AdmissionTicket("t", 1, 1)).limit, house.refused(AdmissionTicket("t", 1, 1)).retry_after) == (
        QuotaLimit.REQUEST_RATE,
        60,
    )


def test_output_is_paid_for_in_advance_and_settled() -> None:
    house = House(None, Tenant("t", "high", output_tokens=RateLimit(60, 1000)))

    def left() -> int:
        return house.accounts.of("t", 0).standing(house.now).rates[0].left

    ticket = house.let_in("t", most=400)
    assert left() == 600
    house.answer(ticket, 100)
    assert left() == 900
    for _ in range(8):
        house.answer(house.let_in("t", most=100), 10)
    assert left() == 820
    ticket = house.let_in("t", most=300)
    assert ticket.expected == 20
    house.answer(ticket, 300)
    assert left() == 520


def test_an_estimate_never_shuts_somebody_out() -> None:
    house = House(None, Tenant("t", "high", output_tokens=RateLimit(60, 100)))
    house.let_in("t", most=10_000)


def test_concurrency_counts_those_that_wait() -> None:
    house = House(ModelLimits(max_running=1), Tenant("t", "high", concurrency=2))
    first = house.let_in("t")
    house.wait("t")
    refusal = house.refused(AdmissionTicket("t", 1, 1))
    assert (refusal.limit, refusal.value, refusal.use, refusal.fault) == (
        QuotaLimit.CONCURRENCY,
        2,
        2,
        RefusalCause.QUOTA,
    )
    house.answer(first, 1)
    house.wait("t")


def test_a_part_of_the_requests_may_be_retries() -> None:
    house = House(None, Tenant("t", "high", retry_fraction=0.5))
    for _ in range(10):
        house.let_in("t")
        assert house.offer(AdmissionTicket("t", 1, 1, retry=True)) == Admit()
    for _ in range(4):
        assert house.offer(AdmissionTicket("t", 1, 1, retry=True)) == Admit()
    refusal = house.refused(AdmissionTicket("t", 1, 1, retry=True))
    assert (refusal.limit, refusal.value, refusal.fault) == (QuotaLimit.RETRIES, 0.5, RefusalCause.QUOTA)
    house.let_in("t")
    house.let_in("t")
    assert house.offer(AdmissionTicket("t", 1, 1, retry=True)) == Admit()
    assert house.gate.usage.of("t", "high").retries == 16


def test_who_waits_is_let_in_when_a_sequence_is_free() -> None:
    house = House(ModelLimits(max_running=2))
    first, _ = house.let_in(), house.let_in()
    third, fourth = house.wait(), house.wait()
    assert house.admitted() == []
    house.answer(first, 1)
    assert house.admitted() == [third]
    assert (house.gate.running, house.gate.waiting, fourth.state) == (2, 1, TicketState.WAITING)


def test_who_waits_is_let_in_when_there_is_memory() -> None:
    house = House()
    house.gate.tell(EngineStatistics(100, 100, 16))
    first = house.let_in(size=800, most=160)
    large, small = house.wait(size=640, most=160), house.wait(size=16, most=16)
    assert house.admitted() == []
    house.answer(first, 3)
    assert house.admitted() == [large, small]
    assert house.gate.headroom.promised == 52


def test_an_engine_without_work_takes_what_it_can_hold() -> None:
    house = House()
    house.gate.tell(EngineStatistics(100, 40, 16))
    house.let_in(size=1400, most=100_000)
    assert house.gate.headroom.promised == 100
    house.wait(size=1, most=1)


def test_an_answer_that_becomes_longer_than_thought_has_more_promised() -> None:
    house = House()
    house.gate.tell(EngineStatistics(100, 100, 16))
    for _ in range(8):
        house.answer(house.let_in(most=500), 16)
    ticket = house.let_in(size=16, most=500)
    assert house.gate.headroom.promised == 2
    house.answer(ticket, 17)
    assert house.gate.headroom.promised == 0
    ticket = house.let_in(size=16, most=500)
    house.gate.started(ticket, 0)
    house.gate.progressed(ticket, 200, 0)
    assert house.gate.headroom.promised == ticket.holding.promised >= 14


def test_a_full_queue() -> None:
    house = House(ModelLimits(max_running=1, queue_length=2))
    house.let_in()
    house.wait()
    house.wait()
    refusal = house.refused()
    assert (refusal.limit, refusal.value, refusal.use, refusal.retry_after) == (QuotaLimit.QUEUE_LENGTH, 2, 2, 1)
    assert type(refusal.as_error()) is Overloaded


def test_a_queue_of_too_many_tokens() -> None:
    house = House(ModelLimits(max_running=1, queue_size=100))
    house.let_in()
    house.wait(size=50, most=30)
    refusal = house.refused(AdmissionTicket("default", 11, 10))
    assert (refusal.limit, refusal.value, refusal.use) == (QuotaLimit.QUEUE_TOKENS, 100, 80)
    house.wait(size=10, most=10)


def test_what_matters_least_makes_room() -> None:
    house = House(ModelLimits(max_running=1, queue_length=2), Tenant("t", "low", input_tokens=RateLimit(60, 100)))
    house.let_in()
    early, late = house.wait("t"), house.wait("t")
    decision = house.offer(AdmissionTicket("default", 10, 10))
    assert isinstance(decision, Wait)
    ((gone, refusal),) = decision.displaced
    assert (gone, gone.state, refusal.limit, early.state) == (
        late,
        TicketState.OVER,
        QuotaLimit.QUEUE_LENGTH,
        TicketState.WAITING,
    )
    standing = house.accounts.of("t", 0).standing(0)
    assert (standing.under_way, standing.rates[0].left) == (1, 90)
    assert house.gate.usage.of("t", "low").refused == {QuotaLimit.QUEUE_LENGTH: 1}


def busy() -> House:
    """Return a house whose engine runs four, in a fifth of a second each time, while eight wait."""
    house = House(ModelLimits(max_running=4))
    running = [house.let_in(size=10, most=10) for _ in range(4)]
    for _ in range(8):
        house.wait()
    for _ in range(30):
        for ticket in running:
            house.now += 50 * MS
            house.gate.started(ticket, house.now)
            house.gate.progressed(ticket, 10, house.now)
        for ticket in running:
            house.gate.finished(ticket, TicketEnding.COMPLETE, house.now)
        running = house.admitted()
        for _ in range(4):
            house.wait()
    return house


def test_a_promise_that_cannot_be_kept_is_not_made() -> None:
    house = busy()
    slow = dataclasses.replace(
        house.accounts.policy, classes={"high": dataclasses.replace(HIGH, ttft_seconds=1.0), "low": LOW}
    )
    house.accounts.follow(slow, house.now)
    house.gate.follow()
    accepted = 0
    while isinstance(decision := house.offer(AdmissionTicket("default", 10, 10)), Wait):
        accepted += 1
    assert isinstance(decision, Refuse)
    assert 4 <= accepted <= 20
    refusal = decision.refusal
    assert (refusal.limit, refusal.value, refusal.of, refusal.retry_after) == (
        QuotaLimit.FIRST_TOKEN,
        1.0,
        "class 'high'",
        1,
    )
    assert isinstance(refusal.use, float)
    assert 1.0 < refusal.use < 1.3


def test_a_deadline_that_cannot_be_met_is_refused_now() -> None:
    house = busy()
    refusal = house.refused(AdmissionTicket("default", 10, 10, deadline=house.now + 50 * MS))
    assert (refusal.limit, refusal.value, refusal.fault) == (QuotaLimit.DEADLINE, 0.05, RefusalCause.TIME)
    assert type(refusal.as_error()) is DeadlineExceeded
    assert 0.4 < float(refusal.use) < 1.0
    assert isinstance(house.offer(AdmissionTicket("default", 10, 10, deadline=house.now + 60 * S)), Wait)
    assert house.refused(AdmissionTicket("default", 10, 10, deadline=house.now)).limit is QuotaLimit.DEADLINE


def test_nothing_is_predicted_from_old_measurements() -> None:
    house = busy()
    house.now += 11 * S
    assert isinstance(house.offer(AdmissionTicket("default", 10, 10, deadline=house.now + 50 * MS)), Wait)


def test_who_waits_too_long_is_refused_exactly_then() -> None:
    house = House(ModelLimits(max_running=1), high=PriorityClass("high", 1, 1, 2.0))
    house.let_in()
    waiting = house.wait()
    hasty = AdmissionTicket("default", 10, 10, deadline=1 * S)
    assert house.offer(hasty) == Wait()
    assert house.gate.next_time() == 1 * S
    house.now = 1 * S - 1
    assert house.gate.due(house.now).refused == []
    house.now = 1 * S
    (refused,) = house.gate.due(house.now).refused
    assert (refused.ticket, refused.refusal.limit) == (hasty, QuotaLimit.DEADLINE)
    assert house.gate.next_time() == 2 * S
    house.now = 2 * S
    (refused,) = house.gate.due(house.now).refused
    assert (refused.ticket, refused.refusal.limit) == (waiting, QuotaLimit.FIRST_TOKEN)
    assert house.gate.next_time() is None
    assert house.gate.waiting == 0


def test_who_would_begin_too_late_behind_those_just_let_in_is_refused() -> None:
    house = House(ModelLimits(max_running=3), high=PriorityClass("high", 1, 1, 1.0))
    for size in (10, 40):  # a token of a prompt takes 10 ms
        ticket = house.let_in(size=size)
        house.now += size * 10 * MS
        house.answer(ticket, 10)
    running = [house.let_in() for _ in range(3)]
    for ticket in running:
        house.now += 100 * MS
        house.gate.started(ticket, house.now)
    first, second, third = (house.wait(size=30) for _ in range(3))
    house.now += 500 * MS
    for ticket in running:
        house.gate.finished(ticket, TicketEnding.COMPLETE, house.now)
    due = house.gate.due(house.now)
    assert due.admitted == [first]
    assert [each.ticket for each in due.refused] == [second, third]
    refusal = due.refused[0].refusal
    assert (refusal.limit, refusal.value, refusal.use) == (QuotaLimit.FIRST_TOKEN, 1.0, pytest.approx(1.1))
    assert (house.gate.waiting, house.gate.running) == (0, 1)


def test_who_waited_is_not_let_in_to_be_cut_at_the_deadline() -> None:
    """What is left has to be enough for an answer that is longer than most."""
    house = House(ModelLimits(max_running=1))
    for tokens in (10, 30) * 10:  # a token takes 50 ms
        house.answer(house.let_in(most=40), tokens, takes=50 * MS)
    runs = house.let_in(most=40)
    hurried, patient = (AdmissionTicket("default", 10, 40, deadline=house.now + wait) for wait in (2 * S, 3 * S))
    assert [house.offer(each) for each in (hurried, patient)] == [Wait(), Wait()]
    house.now += 700 * MS
    house.gate.finished(runs, TicketEnding.CANCELLED, house.now)
    due = house.gate.due(house.now)
    assert [each.ticket for each in due.refused] == [hurried]
    assert due.refused[0].refusal.limit is QuotaLimit.DEADLINE
    assert due.admitted == [patient]


def test_who_waits_survives_an_engine() -> None:
    house = House(ModelLimits(max_running=1), high=PriorityClass("high", 1, 1, 2.0))
    running, waiting = house.let_in(), house.wait()
    house.gate.set_ready(False, house.now)
    house.gate.finished(running, TicketEnding.FAILED, house.now)
    assert house.admitted() == []
    house.now = 30 * S
    assert house.gate.due(house.now).refused == []
    other = house.wait()
    house.gate.set_ready(True, house.now)
    assert house.admitted() == [waiting]
    assert other.state is TicketState.WAITING


def test_what_an_engine_lost_is_not_paid_for() -> None:
    house = House(None, Tenant("t", "high", input_tokens=RateLimit(60, 100), output_tokens=RateLimit(60, 100)))
    ticket = house.let_in("t", size=50, most=50)
    house.gate.finished(ticket, TicketEnding.FAILED, 0)
    assert [rate.left for rate in house.accounts.of("t", 0).standing(0).rates] == [100, 100]


def test_who_gives_up_while_waiting_is_forgotten() -> None:
    house = House(ModelLimits(max_running=1), Tenant("t", "high", input_tokens=RateLimit(60, 100)))
    running, waiting = house.let_in("t"), house.wait("t")
    assert not house.gate.withdraw(running, 0)
    assert house.gate.withdraw(waiting, 0)
    assert not house.gate.withdraw(waiting, 0)
    standing = house.accounts.of("t", 0).standing(0)
    assert (standing.under_way, standing.rates[0].left) == (1, 90)
    assert house.gate.usage.of("t", "high").withdrawn == 1


def test_tokens_for_clients_that_have_gone_are_counted() -> None:
    house = House()
    ticket = house.let_in(size=7, most=100)
    house.gate.started(ticket, 0)
    house.gate.progressed(ticket, 5, 0)
    house.gate.gone(ticket)
    house.gate.progressed(ticket, 2, 0)
    house.gate.finished(ticket, TicketEnding.CANCELLED, 0)
    house.gate.progressed(ticket, 2, 0)
    house.gate.finished(ticket, TicketEnding.COMPLETE, 0)
    ((tenant, level, use),) = house.gate.usage.items()
    assert (tenant, level) == ("default", "high")
    assert (use.offered, use.admitted, use.input_tokens, use.output_tokens, use.wasted_tokens) == (1, 1, 7, 7, 2)
    assert (use.finished, use.finished_tokens) == ({"cancelled": 1}, {"cancelled": 7})


def test_closing_and_draining() -> None:
    house = House(ModelLimits(max_running=1))
    running, waiting, last = house.let_in(), house.wait(), house.wait()
    house.gate.close()
    assert house.refused().limit is QuotaLimit.DRAINING
    house.answer(running, 1)
    assert house.admitted() == [waiting]
    ((gone, refusal),) = house.gate.drain(0)
    assert (gone, refusal.limit, refusal.fault) == (last, QuotaLimit.DRAINING, RefusalCause.LOAD)
    assert (house.gate.running, house.gate.waiting, house.gate.next_time()) == (1, 0, None)


def test_a_policy_is_followed_and_what_was_used_stays_used() -> None:
    house = House(ModelLimits(max_running=1), Tenant("t", "high", requests=RateLimit(10, 10)))
    house.let_in("t")
    waiting = house.wait("t")
    house.accounts.follow(policy(ModelLimits(max_running=2), Tenant("t", "low", requests=RateLimit(20, 5))), 0)
    house.gate.follow()
    assert house.admitted() == [waiting]
    assert house.accounts.of("t", 0).standing(0).rates[0].left == 3
    assert house.wait("t").level is LOW
    house.accounts.follow(policy(ModelLimits()), 0)
    assert house.accounts.of("t", 0).tenant.name == "default"
    assert [account.tenant.name for account in house.accounts] == ["default"]


def test_other_models_are_guarded_by_requests_and_bytes() -> None:
    limits = ModelLimits(max_input=1000, max_running=1, queue_size=1500)
    house = House(limits, Tenant("t", "high", bytes=RateLimit(60, 2000), input_tokens=RateLimit(1, 1)), tokens=False)
    assert house.refused(AdmissionTicket("t", 1001)).limit is QuotaLimit.MAX_BYTES
    first = house.let_in("t", size=1000, most=0)
    house.wait("t", size=900, most=0)
    assert house.refused(AdmissionTicket("t", 101)).limit is QuotaLimit.BYTE_RATE
    assert house.refused(AdmissionTicket("default", 601)).limit is QuotaLimit.QUEUE_BYTES
    house.gate.started(first, 0)
    house.gate.finished(first, TicketEnding.COMPLETE, 0)
    assert len(house.admitted()) == 1
    assert house.accounts.of("t", 0).standing(0).rates[1].left == 100


@settings(max_examples=60)
@given(data=st.data())
def test_every_token_is_accounted(data: st.DataObject) -> None:
    """What was paid in advance is what was generated and what was given back; at the end nothing is held."""
    limits = ModelLimits(max_running=3, queue_length=4)
    house = House(limits, Tenant("a", "high", 2, RateLimit(1, 10**6), RateLimit(1, 10**6)), Tenant("b", "low"))
    gate = house.gate
    gate.tell(EngineStatistics(100, 100, 16))
    running, waiting = list[AdmissionTicket](), list[AdmissionTicket]()
    read = generated = offered = 0
    acts = st.sampled_from(["offer", "offer", "offer", "progress", "finish", "withdraw", "tell", "due"])
    for act in [*data.draw(st.lists(acts, max_size=60)), "end"]:
        if act == "offer":
            ticket = AdmissionTicket(
                data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 500)), data.draw(st.integers(1, 99))
            )
            offered += 1
            decision = gate.offer(ticket, 0)
            if isinstance(decision, Admit):
                running.append(ticket)
            elif isinstance(decision, Wait):
                waiting.append(ticket)
                waiting = [each for each in waiting if each not in {refused.ticket for refused in decision.displaced}]
        elif act == "progress" and running:
            ticket = data.draw(st.sampled_from(running))
            gate.started(ticket, 0)
            gate.progressed(ticket, data.draw(st.integers(1, 20)), 0)
        elif act == "withdraw" and waiting:
            assert gate.withdraw(waiting.pop(), 0)
        elif act == "tell":
            held = sum(each.holding.held for each in running)
            gate.tell(EngineStatistics(100, max(0, 100 - held), 16))
        over = running if act == "end" else running[:1] if act == "finish" else []
        if act == "end":
            for refused in gate.drain(0):
                waiting.remove(refused.ticket)
            assert waiting == []
        for ticket in over:
            gate.finished(ticket, data.draw(st.sampled_from([TicketEnding.COMPLETE, TicketEnding.CANCELLED])), 0)
            read += ticket.input_size if ticket.tenant == "a" else 0
            generated += ticket.generated if ticket.tenant == "a" else 0
        running = running[len(over) :]
        for ticket in gate.due(0).admitted:
            waiting.remove(ticket)
            running.append(ticket)
        assert (gate.running, gate.waiting) == (len(running), len(waiting))
        assert gate.headroom.promised == sum(each.holding.promised for each in running)
    assert gate.headroom.promised == 0
    standing = house.accounts.of("a", 0).standing(0)
    assert (standing.under_way, [rate.left for rate in standing.rates]) == (0, [10**6 - read, 10**6 - generated])
    uses = [use for _, _, use in gate.usage.items()]
    assert sum(use.offered for use in uses) == offered
    assert offered == sum(sum(use.refused.values()) + use.withdrawn + use.admitted for use in uses)
    assert sum(use.admitted for use in uses) == sum(sum(use.finished.values()) for use in uses)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("ending", [TicketEnding.COMPLETE, TicketEnding.FAILED, TicketEnding.CANCELLED])
def test_what_is_paid_for_takes_a_place_and_nothing_else(tokens: bool, ending: TicketEnding) -> None:
    """An item of a batch that runs again after a crash."""
    rate = RateLimit(60, 60)
    tenant = Tenant(
        "acme", "high", concurrency=2, input_tokens=rate, output_tokens=rate, requests=RateLimit(2, 2), bytes=rate
    )
    house = House(None, tenant, tokens=tokens)
    account = house.accounts.of("acme", 0)
    before = account.standing(0).rates
    for started in (True, False):
        ticket = AdmissionTicket("acme", 500, 400, paid=True)
        assert house.offer(ticket) == Admit(), "more than the burst"
        assert account.standing(0).under_way == 1
        if started:
            house.gate.started(ticket, 0)
            if tokens:
                house.gate.correct(ticket, 550, 0)
                house.gate.progressed(ticket, 30, 0)
        house.gate.finished(ticket, ending, 0)
        assert account.standing(0).under_way == 0
        assert account.standing(0).rates == before
    house.let_in("acme")
    house.let_in("acme")
    assert house.refused(AdmissionTicket("acme", 1, 1, paid=True)).limit is QuotaLimit.CONCURRENCY
