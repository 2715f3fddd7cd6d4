from doubles import request
from nerite.scheduling.dynamic_batcher import DefaultScheduler


def test_each_request_alone_in_order_of_arrival() -> None:
    scheduler = DefaultScheduler()
    asked = [request(rows) for rows in (1, 3, 2)]
    assert [scheduler.offer(each, 0) for each in asked] == [None] * 3
    assert scheduler.size == 3
    assert [scheduler.take(0) for _ in range(4)] == [[asked[0]], [asked[1]], [asked[2]], None]
    assert scheduler.size == 0


def test_priorities_and_timeouts_mean_nothing() -> None:
    scheduler = DefaultScheduler()
    first, second = request(priority=5, timeout_us=1), request(priority=1)
    scheduler.offer(first, 0)
    scheduler.offer(second, 0)
    assert not scheduler.timed
    assert scheduler.wake_at(True) is None
    assert scheduler.displace(request(priority=1)) is None
    assert scheduler.expire(10**18) == []
    assert scheduler.take(10**18) == [first]


def test_one_request_is_a_full_batch() -> None:
    scheduler = DefaultScheduler()
    first = request()
    scheduler.offer(first, 0)
    assert scheduler.take_full(0) == [first]
    assert scheduler.take_full(0) is None


def test_withdraw() -> None:
    scheduler = DefaultScheduler()
    first, second = request(), request()
    scheduler.offer(first, 0)
    scheduler.offer(second, 0)
    assert scheduler.withdraw(first)
    assert not scheduler.withdraw(first)
    assert scheduler.size == 1
    assert scheduler.take(0) == [second]
    assert not scheduler.withdraw(second)
    assert not scheduler.withdraw(request())


def test_drain() -> None:
    scheduler = DefaultScheduler()
    asked = [request() for _ in range(3)]
    for each in asked:
        scheduler.offer(each, 0)
    scheduler.withdraw(asked[1])
    assert scheduler.drain() == [asked[0], asked[2]]
    assert (scheduler.size, scheduler.take(0), scheduler.drain()) == (0, None, [])


def test_held_until_enough_wait_and_then_never_again() -> None:
    scheduler = DefaultScheduler(hold_until=2)
    asked = [request() for _ in range(3)]
    scheduler.offer(asked[0], 0)
    assert scheduler.take(0) is None
    scheduler.offer(asked[1], 0)
    assert scheduler.take(0) == [asked[0]]
    assert scheduler.take(0) == [asked[1]]
    scheduler.offer(asked[2], 0)
    assert scheduler.take(0) == [asked[2]]
