"""Which connections are closed to make room, or because nobody uses them, with a clock of the test's own."""

from __future__ import annotations

import weakref

from nerite.transports.limits import ConnectionEntry, ConnectionTable


class Fake:
    def __init__(self, *, busy: bool = False) -> None:
        self.busy = busy
        self.served = 0

    def retire(self) -> None:
        raise AssertionError("a decider closes nothing")

    def drain(self) -> None:
        raise AssertionError("a decider closes nothing")


def table_of(limit: int, *connections: ConnectionEntry, idle_seconds: float = 0) -> ConnectionTable:
    """A table to which a connection came each second."""
    table = ConnectionTable(limit, idle_seconds)
    for second, connection in enumerate(connections):
        table.add(connection, second)
    return table


def test_room_for_as_many_as_the_limit_says() -> None:
    first, second = Fake(), Fake()
    table = table_of(2, first)
    assert not table.full
    table.add(second, 1)
    assert (table.full, len(table)) == (True, 2)
    table.remove(first)
    table.remove(first)
    assert (table.full, len(table)) == (False, 1)


def test_a_connection_that_is_removed_is_not_kept() -> None:
    used, unused = Fake(), Fake()
    table = table_of(2, used, unused)
    used.served = 1
    freed = [weakref.ref(used), weakref.ref(unused)]
    table.remove(used)
    table.remove(unused)
    del used, unused
    assert [each() for each in freed] == [None, None]


def test_no_limit() -> None:
    assert not table_of(0, *(Fake() for _ in range(1000))).full


def test_the_longest_idle_makes_room() -> None:
    connections = [Fake() for _ in range(4)]
    table = table_of(4, *connections)
    connections[0].served = 7  # idle since the next look
    connections[1].busy = True
    assert table.idle(10) == []
    assert [table.make_room(20) for _ in range(4)] == [connections[2], connections[3], connections[0], None]
    assert len(table) == 1


def test_a_connection_that_was_used_since_the_last_look_is_not_idle() -> None:
    used, idle = Fake(), Fake()
    table = table_of(2, used, idle)
    table.idle(10)
    used.served += 1
    assert table.make_room(10.5) is idle


def test_one_that_came_after_the_last_look_makes_room() -> None:
    busy = Fake(busy=True)
    table = table_of(2, busy)
    table.idle(10)
    new = Fake()
    table.add(new, 10.1)
    assert table.make_room(10.2) is new


def test_a_full_table_looks_again_but_not_at_once() -> None:
    one = Fake(busy=True)
    table = table_of(1, one)
    assert table.make_room(10) is None
    one.busy = False
    assert table.make_room(10.5) is None
    assert table.make_room(11) is one


def test_idle_for_too_long() -> None:
    busy, idle, used = Fake(busy=True), Fake(), Fake()
    table = table_of(0, busy, idle, used, idle_seconds=60)
    assert table.idle(30) == []
    used.served += 1
    assert table.idle(60) == []
    assert table.idle(61) == [idle]
    busy.busy = False
    assert table.idle(100) == []  # it was busy when it was last looked at
    assert table.idle(120) == [used]
    assert table.idle(121) == [busy]
    assert len(table) == 0


def test_connections_may_be_idle_for_ever() -> None:
    assert table_of(0, Fake()).idle(10**9) == []
