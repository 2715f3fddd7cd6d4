"""Room for items that nobody else wants: found by refusals, and left to others at once."""

from __future__ import annotations

from nerite.batches.idle_room import IdleRoom


def fill(room: IdleRoom, capacity: int, now: float) -> int:
    """Submit items while the room admits them, to a server that has ``capacity``; return how many were accepted."""
    while room.admits(now):
        room.begun()
        if room.under_way > capacity:
            room.refused(now)
            break
    return room.under_way


def answer(room: IdleRoom, count: int) -> None:
    for _ in range(count):
        room.answered()


def test_the_room_is_found_in_a_few_rounds() -> None:
    room, now = IdleRoom(64), 0.0
    for _ in range(5):
        accepted = fill(room, 16, now)
        answer(room, accepted)
        now += 1
    assert fill(room, 16, now) == 16


def test_no_more_than_the_maximum_are_under_way() -> None:
    room, now = IdleRoom(4), 0.0
    for _ in range(10):
        answer(room, fill(room, 1000, now))
    assert fill(room, 1000, now) == 4


def test_a_refusal_ends_the_growth_and_makes_a_pause() -> None:
    room = IdleRoom(64)
    for _ in range(4):
        answer(room, fill(room, 1000, 0.0))
    fill(room, 10, 5.0)
    assert room.window == 10
    assert not room.admits(5.0)
    wakes = room.wakes(5.0)
    assert wakes is not None
    assert 5.0 < wakes < 5.1
    room.answered()
    assert room.admits(wakes)
    assert room.wakes(wakes) is None


def test_pauses_double_while_nothing_is_answered() -> None:
    room, now, pauses = IdleRoom(64), 0.0, []
    for _ in range(8):
        room.begun()
        room.refused(now)
        wakes = room.wakes(now)
        assert wakes is not None
        pauses.append(wakes - now)
        now = wakes
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == pauses[-2] == 0.5
    room.begun()
    room.answered()
    room.begun()
    room.refused(now)
    assert room.wakes(now) == now + 0.02


def test_what_the_server_says_about_a_retry_is_kept_within_a_minute() -> None:
    room = IdleRoom(64)
    room.begun()
    room.refused(0.0, retry_after=7)
    assert room.wakes(0.0) == 7.0
    room.begun()
    room.refused(10.0, retry_after=3600)
    assert room.wakes(10.0) == 70.0


def test_a_cancelled_item_frees_its_place() -> None:
    room = IdleRoom(64)
    room.begun()
    assert not room.admits(0.0)
    room.withdrawn()
    assert room.admits(0.0)
    assert room.under_way == 0
