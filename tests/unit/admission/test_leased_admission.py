"""Admission by shared quotas: requests wait for Redis if they must, once, and end once whatever becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from doubles import Caller as Sink
from doubles import FakeLoop, request
from nerite.admission import queue as module
from nerite.admission.accounts import Accounts
from nerite.admission.controller import AdmissionController
from nerite.admission.lease_book import LeaseBook
from nerite.admission.policy import AdmissionPolicy, parse_policy
from nerite.admission.queue import AdmissionQueue
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit
from nerite.admission.ticket import AdmissionTicket, Admit, AwaitLease, Refuse, TicketEnding
from nerite.core.errors import Cancelled, NeriteError, QuotaExceeded, Unavailable
from nerite.core.request import Caller, InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.statistics import VersionStatistics
from simulated_redis import SimulatedRedis

S = 1_000_000_000
REDIS = '[redis]\nurl = "redis://h"\n'
POLICY = REDIS + (
    "[tenants.a]\nrequests_per_minute = 60\nrequests_burst = 3\nconcurrency = 2\nretry_fraction = 0.1\n"
    "[tenants.b]\ntokens_per_month = 1000\n"
)
ANSWER = InferenceResponse(ResponseHeader("m", "1", []))


class Office:
    """A controller whose accounts have leases, and the Redis that grants them."""

    def __init__(self, policy: str = POLICY, *, tokens: bool = False, connected: bool = True) -> None:
        self.now = S
        self.redis = SimulatedRedis()
        self.book = LeaseBook("one", lambda: None, self.now, "2026-11")
        self.accounts = Accounts(parse_policy(policy), self.book)
        self.controller = AdmissionController("m", self.accounts, self.now, tokens=tokens)
        if connected:
            self.book.connected()
            self.answer()

    def answer(self) -> None:
        while (command := self.book.exchange(self.now)) is not None:
            self.book.answered(self.redis.execute(command), self.now)

    def offer(self, ticket: AdmissionTicket) -> AdmissionTicket | AdmissionRefusal:
        """Offer a request until it is decided on."""
        decision = self.controller.offer(ticket, self.now)
        while isinstance(decision, AwaitLease):
            self.answer()
            decision = self.controller.offer(ticket, self.now)
        if isinstance(decision, Refuse):
            return decision.refusal
        assert isinstance(decision, Admit)
        return ticket


def admitted(found: AdmissionTicket | AdmissionRefusal) -> AdmissionTicket:
    assert isinstance(found, AdmissionTicket)
    return found


def refused(found: AdmissionTicket | AdmissionRefusal) -> AdmissionRefusal:
    assert isinstance(found, AdmissionRefusal)
    return found


def test_a_request_that_waits_is_counted_once() -> None:
    office = Office()
    ticket = AdmissionTicket("a", 10, retry=True)
    assert isinstance(office.controller.offer(ticket, office.now), AwaitLease)
    assert (office.book.waits, office.accounts.of("a", office.now).retries.left) == (1, 10)
    office.answer()
    assert isinstance(office.controller.offer(ticket, office.now), Admit)
    use = office.controller.usage.of("a", "default")
    assert (use.offered, use.admitted, use.retries) == (1, 1, 1)
    assert office.accounts.of("a", office.now).retries.left == 9


def test_refusals_say_what_is_left_for_all() -> None:
    office = Office()
    for _ in range(3):
        ticket = admitted(office.offer(AdmissionTicket("a", 10)))
        office.controller.started(ticket, office.now)
        office.controller.finished(ticket, TicketEnding.COMPLETE, office.now)
    refusal = refused(office.offer(AdmissionTicket("a", 10)))
    assert (refusal.limit, refusal.retry_after) == (QuotaLimit.REQUEST_RATE, 1)
    assert "requests_per_minute of tenant 'a' is 60, now 0 left of 3" in refusal.as_error().message
    office.now += S
    office.redis.now += 1_000_000
    assert admitted(office.offer(AdmissionTicket("a", 10)))
    use = office.controller.usage.of("a", "default")
    assert (use.offered, use.admitted, use.refused) == (5, 4, {QuotaLimit.REQUEST_RATE: 1})


def test_concurrency_comes_back() -> None:
    office = Office()
    first, _ = (admitted(office.offer(AdmissionTicket("a", 10))) for _ in range(2))
    refusal = refused(office.offer(AdmissionTicket("a", 10)))
    assert (refusal.limit, refusal.value, refusal.use) == (QuotaLimit.CONCURRENCY, 2, 2)
    office.controller.finished(first, TicketEnding.COMPLETE, office.now)
    admitted(office.offer(AdmissionTicket("a", 10)))


def test_without_redis_nobody_waits() -> None:
    office = Office(connected=False)
    assert isinstance(office.controller.offer(AdmissionTicket("a", 10), office.now), Admit)
    admitted(office.offer(AdmissionTicket("a", 10)))
    refusal = refused(office.offer(AdmissionTicket("a", 10)))
    assert refusal.text == "too many concurrent requests; Redis is not reached, so this server admits 1 of the quota"


def test_a_budget_of_a_month_counts_what_was_generated() -> None:
    office = Office(tokens=True)
    ticket = admitted(office.offer(AdmissionTicket("b", 100, 400)))
    office.controller.correct(ticket, 90, office.now)
    office.controller.started(ticket, office.now)
    office.controller.progressed(ticket, 10, office.now)
    office.controller.finished(ticket, TicketEnding.COMPLETE, office.now)
    (budget,) = office.accounts.of("b", office.now).standing(office.now).rates
    assert (budget.limit, budget.burst, budget.left) == (QuotaLimit.BUDGET, 1000, 900)
    refusal = refused(office.offer(AdmissionTicket("b", 950, 1)))
    assert (refusal.limit, refusal.retry_after, refusal.value) == (QuotaLimit.BUDGET, None, 1000)
    assert refusal.text.endswith("more than is left of the month")
    admitted(office.offer(AdmissionTicket("b", 800, 1)))


def test_a_policy_that_has_a_quota_no_more() -> None:
    office = Office()
    admitted(office.offer(AdmissionTicket("a", 10)))
    ticket = admitted(office.offer(AdmissionTicket("a", 10)))
    office.accounts.follow(parse_policy(REDIS + "[tenants.a]\nweight = 2"), office.now)
    office.controller.follow()
    for _ in range(10):
        admitted(office.offer(AdmissionTicket("a", 10)))
    office.controller.finished(ticket, TicketEnding.COMPLETE, office.now)
    office.answer()
    assert [lease.held for lease in office.book.leases] == [0] * 2
    assert office.redis.slots["nerite:{quota}:a:concurrency"] == {}
    office.accounts.follow(parse_policy(POLICY), office.now)
    assert refused(office.offer(AdmissionTicket("a", 10))).limit is QuotaLimit.CONCURRENCY


def test_a_tenant_that_the_policy_has_no_more() -> None:
    office = Office()
    tickets = [admitted(office.offer(AdmissionTicket("a", 10))) for _ in range(2)]
    office.accounts.follow(parse_policy(REDIS), office.now)
    office.accounts.follow(parse_policy(POLICY), office.now)
    assert refused(office.offer(AdmissionTicket("a", 10))).limit is QuotaLimit.CONCURRENCY
    office.accounts.follow(parse_policy(REDIS), office.now)
    for ticket in tickets:
        office.controller.finished(ticket, TicketEnding.COMPLETE, office.now)
    office.answer()
    assert office.redis.slots["nerite:{quota}:a:concurrency"] == {}


class Following:
    """A scheduler that answers when it is told to."""

    def __init__(self) -> None:
        self.entered: list[InferenceRequest] = []
        self.drained: list[Callable[[], None]] = []
        self.pending = 0

    @property
    def in_flight(self) -> int:
        return len(self.entered)

    def submit(self, entering: InferenceRequest) -> None:
        self.entered.append(entering)

    def when_drained(self, call: Callable[[], None]) -> None:
        self.drained.append(call)

    def abandon(self, error: NeriteError) -> None:
        """Nothing waits here."""

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Nothing waits here."""


class House:
    """An admission queue between clients and a scheduler."""

    def __init__(self, loop: FakeLoop) -> None:
        self.office = Office()
        self.office.now = loop.now()
        self.following = Following()
        self.queue = AdmissionQueue(self.office.controller, self.following, VersionStatistics(), loop)  # type: ignore[arg-type]
        self.sink = Sink()

    def ask(self, tenant: str = "a") -> InferenceRequest:
        asked = request(sink=self.sink)
        asked.header.caller = Caller(tenant)
        self.queue.submit(asked)
        return asked

    def answer(self) -> None:
        """Let Redis answer once."""
        command = self.office.book.exchange(self.office.now)
        assert command is not None
        self.office.book.answered(self.office.redis.execute(command), self.office.now)
        self.queue.offer_again()

    def errors(self, *asked: InferenceRequest) -> list[type[NeriteError] | type[None]]:
        return [type(response.error) for each in asked for response in self.sink.of(each)]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    loop = FakeLoop()
    loop.rule(monkeypatch, module)
    return House(loop)


def test_requests_that_wait_are_admitted_in_order(house: House) -> None:
    asked = [house.ask() for _ in range(3)]
    assert (house.following.entered, house.queue.pending) == ([], 3)
    house.answer()
    assert house.following.entered == asked[:2]
    assert house.errors(*asked) == [QuotaExceeded]
    assert house.queue.pending == 0


def test_a_client_that_goes_while_redis_is_asked(house: House) -> None:
    goes, stays = house.ask(), house.ask()
    goes.cancel()
    assert house.errors(goes) == [Cancelled]
    house.answer()
    assert house.following.entered == [stays]
    use = house.office.controller.usage.of("a", "default")
    assert (use.offered, use.admitted, use.withdrawn) == (2, 1, 1)


def test_redis_that_does_not_answer(house: House) -> None:
    asked = house.ask()
    assert house.office.book.exchange(house.office.now) is not None
    house.office.book.lost(house.office.now)
    house.queue.offer_again()
    assert house.following.entered == [asked]


def test_the_end_while_redis_is_asked(house: House) -> None:
    asked, drained = house.ask(), []
    house.queue.when_drained(lambda: drained.append(True))
    house.queue.abandon(Unavailable("the end"))
    assert house.errors(asked) == [Unavailable]
    for call in house.following.drained:
        call()
    assert drained == [True]
    house.queue.offer_again()
    assert house.following.entered == []


def test_a_model_that_is_unloaded_while_redis_is_asked(house: House) -> None:
    asked, drained = house.ask(), []
    house.queue.when_drained(lambda: drained.append(True))
    assert house.following.drained == []
    house.answer()
    assert house.following.entered == [asked]
    assert len(house.following.drained) == 1


def test_accounts_without_redis_never_wait() -> None:
    accounts = Accounts(AdmissionPolicy())
    assert accounts.of("a", 0).pending({QuotaLimit.REQUEST_RATE: 1, QuotaLimit.CONCURRENCY: 1}, 0) is False
