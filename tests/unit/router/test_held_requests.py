"""Requests that wait for a member: in which order they go on, for how long they wait, and that each ends once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from nerite.balancing.model_demand import ModelDemand
from nerite.core.errors import NeriteError, Unavailable
from nerite.observability.histogram import Histogram
from nerite.router.held_requests import HeldRequest, HeldRequests, HoldQueue

SECOND = 1_000_000_000


class Pool:
    """A pool that lets requests wait."""

    def __init__(self, name: str = "p", most_held: int = 100, hold_timeout: float = 60.0) -> None:
        self.name = name
        self.held = 0
        self.holds: Counter[str] = Counter()
        self.hold_seconds = Histogram((1.0, 10.0))
        self.model_demand: ModelDemand | None = ModelDemand()
        self.most_held = most_held
        self.hold_timeout = hold_timeout
        self.obstacle = ("", 0)
        self.began: list[str] = []

    def obstacle_to(self, model: str, now_ns: int) -> tuple[str, int]:
        return self.obstacle

    def hold_began(self, model: str) -> None:
        self.began.append(model)


class Request:
    """A request that goes on when its member is there."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.told: list[NeriteError] = []
        self.ended = asyncio.Event()
        self.room = True
        self.held: HeldRequests | None = None
        self.place: HeldRequest | NeriteError | None = None

    def go_on(self) -> bool:
        if self.room:
            assert self.held is not None and isinstance(self.place, HeldRequest)
            self.held.leave(self.place, "served")
            self.log.append(self.name)
        return self.room

    def give_up(self, error: NeriteError) -> None:
        self.told.append(error)
        self.ended.set()


class Clock:
    """A clock that stands still between two settings."""

    def __init__(self) -> None:
        self.now = SECOND

    def __call__(self) -> int:
        return self.now


def test_first_come_first_served_in_each_class() -> None:
    queue, pool = HoldQueue(), Pool()
    batch = [queue.add(pool, "m", 1, SECOND, Request()) for _ in range(2)]
    interactive = [queue.add(pool, "m", 0, SECOND, Request()) for _ in range(2)]
    other = queue.add(pool, "n", 0, SECOND, Request())
    order = []
    while (first := queue.first("p", "m")) is not None:
        order.append(first)
        queue.remove(first, SECOND, served=True)
    assert order == [*interactive, *batch]
    assert queue.wanted == [("p", "n")]
    queue.remove(other, SECOND, served=False)
    assert queue.wanted == []
    assert queue.next_expiry() is None


def test_pools_have_queues_of_their_own() -> None:
    queue = HoldQueue()
    one, two = (queue.add(Pool(name), "m", 0, SECOND, Request()) for name in ("one", "two"))
    assert queue.first("two", "m") is two
    assert queue.counts("one") == {"m": 1}
    assert queue.waiting("two") == [two]
    queue.remove(two, SECOND, served=True)
    assert queue.waiting() == [one]


def test_requests_time_out_by_the_time_of_their_pool() -> None:
    queue = HoldQueue()
    slow = queue.add(Pool("slow", hold_timeout=60.0), "m", 0, SECOND, Request())
    fast = queue.add(Pool("fast", hold_timeout=5.0), "m", 0, 2 * SECOND, Request())
    assert queue.next_expiry() == 7 * SECOND
    assert queue.expired(7 * SECOND - 1) == []
    assert queue.expired(7 * SECOND) == [fast]
    assert queue.expired(61 * SECOND) == [slow, fast]


def test_retry_after_tells_what_is_known() -> None:
    queue, pool = HoldQueue(), Pool()
    assert queue.retry_after(pool, "m", SECOND) == 5
    held = queue.add(pool, "m", 0, SECOND, Request())
    queue.remove(held, 21 * SECOND, served=True)
    assert queue.retry_after(pool, "m", 30 * SECOND) == 20, "as long as the last wait took"
    queue.add(pool, "m", 0, 30 * SECOND, Request())
    assert queue.retry_after(pool, "m", 42 * SECOND) == 8
    assert queue.retry_after(pool, "m", 90 * SECOND) == 1
    assert queue.retry_after(pool, "other", 90 * SECOND) == 5
    pool.obstacle = ("its load has failed", 100 * SECOND)
    assert queue.retry_after(pool, "m", 90 * SECOND) == 10


def hold(held: HeldRequests, pool: Pool, request: Request, model: str = "m", order: int = 0) -> object:
    request.held = held
    request.place = held.hold(pool, model, order, request)
    return request.place


def test_held_requests_go_on_when_members_change() -> None:
    async def play() -> None:
        held, pool, log = HeldRequests(), Pool(), list[str]()
        requests = [Request(name, log) for name in "abc"]
        for each in requests:
            hold(held, pool, each)
        requests[1].room = False
        held.offer_soon()
        await asyncio.sleep(0)
        assert (log, pool.held) == (["a"], 2), "no request overtakes the one before it"
        requests[1].room = True
        held.offer_soon()
        await asyncio.sleep(0)
        assert (log, pool.held) == (["a", "b", "c"], 0)
        assert pool.holds == {"served": 3}
        assert pool.began == ["m"] * 3
        assert pool.model_demand is not None
        assert pool.model_demand.take(SECOND).keys() <= {"m"}

    asyncio.run(play())


def test_a_request_that_cannot_go_on_keeps_nobody_waiting() -> None:
    class Broken(Request):
        def go_on(self) -> bool:
            raise ZeroDivisionError

    async def play() -> None:
        held, pool, log = HeldRequests(), Pool(), list[str]()
        broken = Broken()
        for each in (broken, Request("a", log)):
            hold(held, pool, each)
        hold(held, pool, Request("b", log), model="n")
        held.offer_soon()
        await asyncio.sleep(0)
        assert log == ["a", "b"]
        assert ["internal error" in error.message for error in broken.told] == [True]
        assert (pool.held, pool.holds) == (0, {"refused": 1, "served": 2})

    asyncio.run(play())


def test_a_refusal_that_fails_keeps_no_other_from_being_told() -> None:
    class Broken(Request):
        def give_up(self, error: NeriteError) -> None:
            raise ZeroDivisionError

    async def play() -> None:
        held, pool, request = HeldRequests(), Pool(hold_timeout=0.01), Request()
        for each in (Broken(), request):
            hold(held, pool, each)
        await asyncio.wait_for(request.ended.wait(), 10)
        assert (pool.held, pool.holds) == (0, {"timeout": 2})

    asyncio.run(play())


def test_too_many_are_refused() -> None:
    async def play() -> None:
        held, pool = HeldRequests(), Pool(most_held=1)
        hold(held, pool, Request())
        error = hold(held, pool, Request())
        assert isinstance(error, Unavailable)
        assert error.message == (
            "no member of pool 'p' can serve model 'm' now: 1 requests wait for members already, "
            "as many as hold-requests allows"
        )
        assert error.retry_after == 5
        assert pool.holds == {"full": 1}
        held.stop(Unavailable("the router stops"))

    asyncio.run(play())


def test_nobody_waits_in_vain() -> None:
    async def play() -> None:
        clock = Clock()
        held, pool, request = HeldRequests(clock), Pool(), Request()
        hold(held, pool, request)
        pool.obstacle = ("its load has failed", 8 * SECOND)
        held.fail(pool, "m")
        error = hold(held, pool, Request())
        assert isinstance(error, Unavailable)
        assert [error.message] == [each.message for each in request.told]
        assert (error.retry_after, error.http_status) == (7, 503)
        assert (pool.held, pool.holds) == (0, {"in_vain": 2})

    asyncio.run(play())


def test_the_wait_has_an_end() -> None:
    async def play() -> None:
        held, request = HeldRequests(), Request()
        pool = Pool(hold_timeout=0.02)
        pool.obstacle = ("members have no room", 0)
        hold(held, pool, request)
        async with asyncio.timeout(30):
            await request.ended.wait()
        (error,) = request.told
        assert error.message == (
            "no member of pool 'p' can serve model 'm' now: the request has waited for 0.02 s, the hold-timeout: "
            "members have no room"
        )
        assert (pool.held, pool.holds) == (0, {"timeout": 1})

    asyncio.run(play())


@pytest.mark.parametrize("late", [False, True])
def test_a_router_that_stops_lets_nobody_wait(late: bool) -> None:
    async def play() -> None:
        held, pool, request = HeldRequests(), Pool(), Request()
        error = Unavailable("the router stops", 1)
        if late:
            held.stop(error)
            assert hold(held, pool, request) is error
        else:
            hold(held, pool, request)
            held.stop(error)
            assert request.told == [error]
        assert (pool.held, pool.holds) == (0, {"stopped": 1})

    asyncio.run(play())
