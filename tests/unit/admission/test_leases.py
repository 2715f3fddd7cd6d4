"""Leases of shared quotas: what servers use together, whatever becomes of them, of replies, and of Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.admission.lease_book import MOST_ITEMS, TICKS, LeaseBook
from nerite.admission.leases import ConcurrencyLease, QuotaLease
from simulated_redis import SimulatedRedis

MS = 1_000_000
S = 1000 * MS
MINUTE = 60 * S


@dataclass
class Fleet:
    """Servers that share quotas over one Redis. What is due is exchanged when the test says so."""

    rate: int = 60
    burst: int = 100
    share: float | None = None
    month: str = "2026-11"
    now: int = 0
    redis: SimulatedRedis = field(default_factory=SimulatedRedis)
    books: list[LeaseBook] = field(default_factory=list)
    names: int = 0
    delayed: dict[int, list[int]] = field(default_factory=dict)
    """Replies that have not arrived, by server."""

    def join(self, connected: bool = True) -> int:
        """Start a server; return its number."""
        index = len(self.books)
        self.books.append(self._book())
        if connected:
            self.connect(index)
        return index

    def restart(self, index: int) -> None:
        """Replace a server that has crashed."""
        self.delayed.pop(index, None)
        self.books[index] = self._book()
        self.connect(index)

    def _book(self) -> LeaseBook:
        self.names += 1
        return LeaseBook(f"server-{self.names}", lambda: None, self.now, self.month, self.share)

    def connect(self, index: int) -> None:
        self.books[index].connected()
        self.settle(index)

    def exchange(self, index: int, answer: bool = True) -> bool:
        """Let a server exchange what is due, if anything is; ``answer``: the reply arrives."""
        book = self.books[index]
        if index in self.delayed:
            book.answered(self.delayed.pop(index), self.now)
        command = book.exchange(self.now)
        if command is None:
            return False
        reply = self.redis.execute(command)
        if answer:
            book.answered(reply, self.now)
        else:
            book.lost(self.now)
        return answer

    def settle(self, index: int) -> None:
        """Let a server exchange until nothing is due."""
        while self.exchange(index):
            pass

    def delay(self, index: int) -> None:
        """Let a server send all that is due; the reply arrives when it exchanges again."""
        for _ in range(TICKS):
            self.books[index].tick(self.now, self.month)
        if index not in self.delayed and (command := self.books[index].exchange(self.now)) is not None:
            self.delayed[index] = self.redis.execute(command)

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass, a second at a time, with the exchanges that are due."""
        while seconds > 0:
            step = min(seconds, 1.0)
            self.wait(step)
            seconds -= step
            for index, book in enumerate(self.books):
                self.settle(index)
                for _ in range(TICKS):
                    book.tick(self.now, self.month)
                self.settle(index)

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * S)
        self.redis.now += int(seconds * 1e6)

    def quota(self, index: int, tenant: str = "acme") -> QuotaLease:
        return self.books[index].quota(tenant, "tokens", self.rate, self.burst, self.now)

    def budget(self, index: int) -> QuotaLease:
        return self.books[index].monthly_quota("acme", "budget", 1000, self.now)

    def places(self, index: int, most: int = 4) -> ConcurrencyLease:
        return self.books[index].concurrency("acme", "concurrency", most, self.now)

    def ask(self, index: int, count: int, lease: QuotaLease | None = None) -> bool:
        """Return whether a request for ``count`` is admitted, after it has waited for Redis if it must."""
        lease = lease or self.quota(index)
        for _ in range(5):
            if not lease.pending(count, self.now):
                break
            self.exchange(index)
        if lease.until(count, self.now) != 0:
            return False
        lease.take(count, self.now)
        return True

    def enter(self, index: int, most: int = 4) -> bool:
        places = self.places(index, most)
        for _ in range(5):
            if not places.pending(1, self.now):
                break
            self.exchange(index)
        if places.until(self.now):
            return False
        places.take(self.now)
        return True


def fleet(servers: int = 3, **settings: int | float) -> Fleet:
    made = Fleet(**settings)  # type: ignore[arg-type]
    for _ in range(servers):
        made.join()
    made.tick()
    return made


def test_servers_use_one_quota() -> None:
    three = fleet()
    assert [three.ask(number % 3, 1) for number in range(100)] == [True] * 100
    assert [three.ask(index, 1) for index in range(3)] == [False] * 3
    three.tick(2)
    assert [three.ask(index, 1) for index in range(3)].count(True) == 2


def test_the_smallest_quota_is_used_once() -> None:
    three = fleet(rate=1, burst=1)
    assert [three.ask(index, 1) for index in (1, 2, 0, 1)] == [True, False, False, False]
    assert three.quota(2).until(1, three.now) == pytest.approx(MINUTE, rel=0.05)
    assert three.quota(2).until(2, three.now) is None
    three.tick(60)
    assert [three.ask(index, 1) for index in (2, 1)] == [True, False]


def test_a_steady_tenant_does_not_wait_for_redis() -> None:
    one = fleet(1, rate=6_000_000, burst=100_000)
    lease = one.quota(0)
    waited = []
    for number in range(2000):
        waited.append(lease.pending(10, one.now))
        one.exchange(0)
        lease.take(10, one.now)
        one.wait(0.001)
        if number % 1000 == 999:
            one.tick(0.001)
    assert waited[0]
    assert sum(waited[:100]) < 10
    assert not any(waited[100:])
    assert 0 < lease.held < 3 * 10_000, "about the use of a second"


def test_a_lease_that_nobody_uses_goes_back() -> None:
    two = fleet(2, rate=1)
    for _ in range(10):
        assert two.ask(0, 1)
    two.tick(3)
    assert two.quota(0).held <= 4
    two.tick(12)
    assert two.quota(0).held == 0
    assert [*two.books[0].leases] == []
    assert [two.ask(1, 1) for _ in range(90)] == [True] * 90
    assert not two.ask(0, 1)


def test_what_is_owed_is_told_and_what_is_unused_comes_back() -> None:
    two = fleet(2, rate=1)
    assert two.ask(0, 10)
    two.quota(0).take(50, two.now)
    two.exchange(0)
    two.tick(15)
    assert (two.quota(0).held, two.ask(1, 41), two.ask(1, 40)) == (0, False, True)
    two.quota(0).give_back(30, two.now)
    two.tick(15)
    assert [two.ask(1, 31), two.ask(1, 30)] == [False, True]


def test_requests_that_wait_together_are_served_in_order() -> None:
    one = fleet(1)
    lease = one.quota(0)
    assert [lease.pending(count, one.now) for count in (60, 30, 20)] == [True] * 3
    one.exchange(0)
    admitted = []
    for count in (60, 30, 20):
        if not lease.pending(count, one.now) and lease.until(count, one.now) == 0:
            lease.take(count, one.now)
            admitted.append(count)
    assert admitted == [60, 30]


def test_without_redis_the_lease_goes_on_and_then_a_share() -> None:
    three = fleet(rate=600, burst=90)
    assert three.ask(0, 30)
    three.tick()
    held = three.quota(0).held
    left = three.quota(0).left_at(three.now)
    three.books[0].lost(three.now)
    assert three.books[0].away_text == "; Redis is not reached, so this server admits 0.333 of the quota"
    used = 0
    while three.ask(0, 1):
        used += 1
    assert used == held + left // 3
    three.wait(6)
    assert [three.ask(0, 1) for _ in range(21)] == [True] * 20 + [False]
    assert not three.ask(0, 91)
    three.wait(60)
    assert three.ask(0, 90), "as large as a request may be, once the share is full"
    assert not three.ask(0, 1)


def test_what_was_used_without_redis_is_told_when_it_is_back() -> None:
    two = fleet(2, rate=0, burst=100)
    budgets = [two.budget(index) for index in range(2)]
    assert two.ask(0, 100, budgets[0])
    two.books[0].lost(two.now)
    assert two.ask(0, 300, budgets[0])
    two.connect(0)
    two.exchange(0)
    assert two.ask(1, 601, budgets[1]) is False
    two.tick(15)
    assert two.ask(1, 600, budgets[1])
    two.tick()
    assert not two.ask(0, 1, budgets[0])


@pytest.mark.parametrize(("share", "admitted"), [(0.0, 0), (0.5, 50), (1.0, 100)])
def test_a_server_that_starts_without_redis(share: float, admitted: int) -> None:
    one = Fleet(share=share)
    one.join(connected=False)
    assert sum(one.ask(0, 1) for _ in range(200)) == admitted
    assert one.quota(0).until(1, one.now) == (S if not share else pytest.approx(S / share, rel=0.05))
    one.connect(0)
    one.tick()
    assert one.ask(0, 2) == (admitted < 100)


def test_errors_that_come_again_give_no_share_again() -> None:
    """A Redis that can be reached, and answers nothing that is of use."""
    one = Fleet(share=0.5)
    one.join(connected=False)
    for _ in range(5):
        one.books[0].connected()
        assert one.books[0].exchange(one.now) is not None
        one.books[0].lost(one.now)
    assert sum(one.ask(0, 1) for _ in range(200)) == 50


def test_a_lost_reply_charges_nothing_twice() -> None:
    two = fleet(2, rate=0)
    lease = two.budget(0)
    assert two.ask(0, 10, lease)
    assert lease.pending(500, two.now)
    two.exchange(0, answer=False)
    two.connect(0)
    two.tick(15)
    assert two.ask(1, 990, two.budget(1))


def test_data_that_redis_has_lost_are_restored() -> None:
    two = fleet(2)
    budgets = [two.budget(index) for index in range(2)]
    assert two.ask(0, 700, budgets[0])
    two.tick(15)
    two.redis.flush()
    two.restart(1)
    new = two.budget(1)
    two.tick(2)
    assert two.ask(1, 301, new) is False
    two.tick(2)
    assert two.ask(1, 300, new)


def test_what_is_granted_before_the_last_server_has_told_counts() -> None:
    """Servers know different amounts to be left; the first that tells gets some before the others have told."""
    for first in range(2):
        two = fleet(2, rate=0)
        budgets = [two.budget(index) for index in range(2)]
        used = sum(amount for index, amount in ((0, 400), (1, 300)) if two.ask(index, amount, budgets[index]))
        assert used == 700
        two.redis.flush()
        for index in (first, 1 - first):
            two.books[index].lost(two.now)
            two.connect(index)
            used += 100 * two.ask(index, 100, budgets[index])
        two.tick(15)
        for index in range(2):
            while two.ask(index, 25, budgets[index]):
                used += 25
        assert used == 1000


def test_data_are_restored_once() -> None:
    """What others have given back since they were lost is not taken again."""
    two = fleet(2)
    assert two.ask(0, 700, two.budget(0))
    two.tick(15)
    two.redis.flush()
    two.tick(2)
    assert two.ask(1, 200, two.budget(1))
    two.budget(1).give_back(200, two.now)
    two.tick(15)
    assert [two.ask(0, 301, two.budget(0)), two.ask(0, 300, two.budget(0))] == [False, True]


def test_a_new_month_is_a_new_budget() -> None:
    two = fleet(2)
    lease = two.budget(0)
    assert two.ask(0, 1000, lease)
    assert two.budget(1).pending(1, two.now)
    two.exchange(1)
    assert two.budget(1).until(1, two.now) is None
    two.month = "2026-12"
    two.tick(15)
    lease.give_back(50, two.now)
    assert two.ask(0, 1001, lease) is False
    assert two.ask(1, 1000, two.budget(1))
    assert not two.ask(0, 1, lease)


def test_what_is_offered_back_is_not_used_any_more() -> None:
    """The reply may be long in coming, while others use it."""
    two = fleet(2)
    lease = two.budget(0)
    for _ in range(10):
        assert two.ask(0, 10, lease)
    assert lease.held >= 20
    two.wait(15)
    two.delay(0)
    assert two.ask(1, 900, two.budget(1))
    assert lease.held == 0
    assert not two.ask(0, 1, lease)


def test_a_quota_that_the_policy_changes() -> None:
    two = fleet(2)
    assert two.ask(0, 60)
    for index in range(2):
        two.books[index].quota("acme", "tokens", 60, 50, two.now)
    two.burst = 50
    two.tick(15)
    assert not two.ask(1, 10)
    two.tick(15)
    assert two.ask(1, 10)
    two.books[0].close(two.quota(0))
    two.exchange(0)
    assert two.quota(0).held == 0


def test_concurrency_is_shared() -> None:
    three = fleet()
    assert [three.enter(index) for index in (0, 1, 2, 0, 1)] == [True] * 4 + [False]
    three.places(0).leave(three.now)
    three.tick()
    assert [three.enter(1), three.enter(2)] == [True, False]


def test_places_of_a_server_that_is_gone_are_free_after_a_while() -> None:
    two = fleet(2)
    assert [two.enter(0) for _ in range(4)] == [True] * 4
    two.tick(20)
    assert not two.enter(1)
    two.books[0] = two.books[1]
    two.tick(6)
    assert not two.enter(1)
    two.tick(5)
    assert [two.enter(1) for _ in range(5)] == [True] * 4 + [False]


def test_concurrency_without_redis() -> None:
    two = fleet(2)
    assert [two.enter(0) for _ in range(3)] == [True] * 3
    for book in two.books:
        book.lost(two.now)
    assert [two.enter(1) for _ in range(3)] == [True, True, False], "its share"
    assert sum(two.enter(0) for _ in range(4)) <= 1
    two.places(0).leave(two.now)
    assert two.enter(0)


def test_at_the_end_everything_comes_back() -> None:
    two = fleet(2, rate=0)
    assert two.ask(0, 10, two.budget(0))
    assert two.enter(0)
    two.places(0).leave(two.now)
    command = two.books[0].last_exchange(two.now)
    assert command is not None
    two.redis.execute(command)
    assert two.ask(1, 990, two.budget(1))
    assert [*two.redis.servers] == ["server-2"]


def test_many_leases_take_several_exchanges() -> None:
    one = fleet(1)
    tenants = [f"tenant-{number}" for number in range(2 * MOST_ITEMS + 1)]
    leases = [one.quota(0, tenant) for tenant in tenants]
    exchanges = 0
    while sum(lease.pending(1, one.now) for lease in leases):
        command = one.books[0].exchange(one.now)
        assert command is not None
        one.books[0].answered(one.redis.execute(command), one.now)
        exchanges += 1
    assert exchanges == 3
    assert all(lease.until(1, one.now) == 0 for lease in leases)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "ask",
                "ask",
                "ask",
                "ask",
                "refund",
                "crash",
                "lose reply",
                "use at once",
                "use at once",
                "delay",
                "wait",
                "tick",
            ]
        ),
        st.integers(0, 2),
        st.integers(1, 40),
    ),
    max_size=80,
)


@given(ACTS, st.integers(0, 600), st.integers(1, 100))
def test_together_they_never_use_more(acts: list[tuple[str, int, int]], rate: int, burst: int) -> None:
    """Neither lost replies nor crashes let servers use more than the bucket, while Redis answers."""
    three = fleet(rate=rate, burst=burst)
    begin, used, charged = three.now, 0, [0, 0, 0]
    for what, index, count in acts:
        if what == "ask" and three.ask(index, count):
            used += count
            charged[index] = count
        elif what == "refund" and charged[index]:
            three.quota(index).give_back(charged[index] // 2, three.now)
            used -= charged[index] // 2
            charged[index] = 0
        elif what == "use at once":  # of what is held, while an exchange may be under way
            lease = three.quota(index)
            if lease.held >= count:
                lease.take(count, three.now)
                used += count
        elif what == "delay":
            three.delay(index)
        elif what == "crash":
            three.restart(index)
            charged[index] = 0
        elif what == "lose reply":
            three.exchange(index)
            three.quota(index).pending(count, three.now)
            three.exchange(index, answer=False)
            three.connect(index)
        elif what == "wait":
            three.wait(count / 100)
        elif what == "tick":
            three.tick(count / 10)
        assert used <= burst + rate * (three.now - begin) / MINUTE


@given(ACTS, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=4), st.integers(1, 100))
def test_without_redis_they_use_their_shares_more(
    acts: list[tuple[str, int, int]], outages: list[tuple[int, int]], burst: int
) -> None:
    three = fleet(rate=600, burst=burst)
    begin, used, allowed = three.now, 0, float(burst)
    asks = [(index, count) for what, index, count in acts if what == "ask"]
    for index, seconds in outages:
        three.books[index].lost(three.now)
        for step in range(seconds):
            for server, count in asks[step::seconds]:
                used += count if three.ask(server, count) else 0
            three.tick()
        # Its share of the burst and of the rate, and one request that was larger than the share.
        allowed += 1 + burst / 3 + (seconds + 1) * 10 / 3 + burst
        three.connect(index)
        three.tick()
        assert used <= allowed + 600 * (three.now - begin) / MINUTE
    three.tick(600)
    assert three.ask(0, burst), "everything is there again"
