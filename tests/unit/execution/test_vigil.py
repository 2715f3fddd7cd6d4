"""When a worker stays awake for its next message."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from nerite.backends import cores
from nerite.core.errors import InvalidArgument
from nerite.execution.vigil import Vigil, limit_of

LIMIT = 400.0


class FakeChannel:
    """A socket on which a message comes at a given time; each look at it takes one unit."""

    def __init__(self) -> None:
        self.now = 0.0
        self.message_at = 0.0
        self.looks = 0
        self.slept = 0

    def clock(self) -> float:
        return self.now

    def recv_into(self, space: memoryview, size: int = 0, flags: int = 0) -> int:
        if not flags:
            self.slept += 1
            self.now = max(self.now, self.message_at)
            return 3
        self.looks += 1
        self.now += 1
        if self.now < self.message_at:
            raise BlockingIOError
        return 3


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def vigil(channel: FakeChannel) -> Vigil:
    pretended: Any = channel
    vigil = Vigil(pretended, channel.clock)
    vigil.limit = LIMIT
    return vigil


def receive(vigil: Vigil, channel: FakeChannel, after: float) -> tuple[bool, bool]:
    """Wait for a message that comes after so long; return whether the worker looked, and whether it slept."""
    looks, slept = channel.looks, channel.slept
    channel.message_at = channel.now + after
    assert vigil.receive(memoryview(bytearray(8))) == 3
    return channel.looks > looks, channel.slept > slept


def test_messages_that_come_soon_are_waited_for_awake(vigil: Vigil, channel: FakeChannel) -> None:
    receive(vigil, channel, 10)
    for after in (0, 10, LIMIT - 2):
        assert receive(vigil, channel, after) == (True, False)


def test_it_sleeps_in_the_end_and_from_then_on(vigil: Vigil, channel: FakeChannel) -> None:
    receive(vigil, channel, 10)
    assert receive(vigil, channel, LIMIT * 10) == (True, True)
    assert channel.looks < 2 * LIMIT
    assert receive(vigil, channel, LIMIT * 10) == (False, True)
    # One message that comes soon, and it is worth it again.
    assert receive(vigil, channel, 10) == (False, True)
    assert receive(vigil, channel, 10) == (True, False)


def test_rare_messages_cost_nothing(vigil: Vigil, channel: FakeChannel) -> None:
    receive(vigil, channel, LIMIT * 2)
    looks = channel.looks
    for _ in range(100):
        receive(vigil, channel, LIMIT + 1)
    assert channel.looks == looks


def test_never(vigil: Vigil, channel: FakeChannel) -> None:
    vigil.limit = 0.0
    for _ in range(3):
        assert receive(vigil, channel, 0) == (False, True)


def test_a_real_channel_and_its_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        vigil = Vigil(ours)
        vigil.limit = 0.05
        space = memoryview(bytearray(8))
        for _ in range(3):
            theirs.send(b"abc")
            assert (vigil.receive(space), bytes(space[:3])) == (3, b"abc")
        theirs.close()
        assert vigil.receive(space) == 0


@pytest.mark.parametrize(("usable", "quota", "microseconds"), [(2, 0, 400), (1, 0, 0), (2, 2, 0)])
def test_by_default_nobody_is_kept_from_working(
    monkeypatch: pytest.MonkeyPatch, usable: int, quota: int, microseconds: int
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: usable)
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert limit_of({}) == microseconds / 1e6
    assert limit_of({"stay-awake-microseconds": "50"}) == 50e-6
    assert limit_of({"stay-awake-microseconds": "0"}) == 0.0


@pytest.mark.parametrize("value", ["", "-1", "many", "1.5"])
def test_a_setting_that_is_no_number(value: str) -> None:
    with pytest.raises(InvalidArgument, match="backend setting 'stay-awake-microseconds' is"):
        limit_of({"stay-awake-microseconds": value})
