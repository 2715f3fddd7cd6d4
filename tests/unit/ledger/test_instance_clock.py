"""The clock of an instance: each moment is counted once."""

from __future__ import annotations

from nerite.ledger.instance_clock import InstanceClock

DAY_NS = 86_400_000_000_000


def test_what_lies_between_executions_is_idle() -> None:
    clock = InstanceClock(1, 100)
    assert clock.use(150, 180) == 30
    assert clock.use(200, 210) == 10
    assert (clock.idle_ns, clock.used_ns, clock.until_ns) == (70, 40, 210)


def test_a_moment_is_not_counted_twice() -> None:
    clock = InstanceClock(1, 0)
    assert clock.use(10, 50) == 40
    assert clock.use(40, 60) == 10
    assert clock.use(20, 60) == 0
    clock.rest(55)
    assert (clock.idle_ns, clock.used_ns) == (10, 50)


def test_a_batch_that_died_used_the_time_since_it_began() -> None:
    clock = InstanceClock(1, 0)
    clock.lease(100)
    clock.lease(120)
    assert clock.leased
    assert clock.use_lease(150) == 50
    clock.end_lease()
    assert clock.use_lease(150) == 0, "the second had not begun"
    clock.end_lease()
    assert not clock.leased
    assert clock.idle_ns == 100


def test_a_day_begins_where_the_one_before_was_read_last() -> None:
    clock = InstanceClock(7, 0)
    clock.use(10, 30)
    first = clock.reading("m", "1", "m_0", 0)
    assert (first.number, first.day, first.since, first.idle_ns, first.used_ns) == (7, 0, 0.0, 10, 20)
    clock.rest(DAY_NS + 5)
    second = clock.reading("m", "1", "m_0", 0)
    assert (second.day, second.since, second.until) == (1, first.until, (DAY_NS + 5) / 1e9)
    assert (second.idle_ns, second.used_ns) == (DAY_NS + 5 - 30, 0)
    clock.use(DAY_NS + 5, DAY_NS + 8)
    assert clock.reading("m", "1", "m_0", 0).used_ns == 3
