"""An alarm rings once, never early, and only for the last time it was set for."""

from __future__ import annotations

import pytest

from doubles import FakeLoop
from nerite.dispatch.busy_poll import LoopTimer

MS = 1_000_000


class Clock:
    """An alarm on a loop, and when it rang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.loop.rule(monkeypatch)
        self.began = self.loop.now()
        self.rang: list[int] = []
        self.every: int | None = None
        """After how long it is set again while it rings."""
        self.alarm = LoopTimer(self.loop, self.ring)  # type: ignore[arg-type]

    def ring(self) -> None:
        self.rang.append(self.loop.now() - self.began)
        if self.every is not None:
            self.alarm.set(self.loop.now() + self.every)

    def set(self, after: int) -> None:
        self.alarm.set(self.began + after)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_it_rings_once_and_not_before_its_time(clock: Clock) -> None:
    clock.set(2 * MS + 300_000)
    clock.loop.advance(10 * MS)
    assert len(clock.rang) == 1
    assert 0 <= clock.rang[0] - (2 * MS + 300_000) <= FakeLoop.TURN_NS


@pytest.mark.parametrize("instead", [MS, 5 * MS])
def test_the_last_time_it_was_set_for_holds(clock: Clock, instead: int) -> None:
    clock.set(3 * MS)
    clock.set(instead)
    clock.loop.advance(10 * MS)
    assert clock.rang == [instead]


def test_set_for_the_same_time_again_it_goes_on(clock: Clock) -> None:
    clock.set(3 * MS)
    timer = clock.loop.next_timer
    clock.loop.pass_time(MS)
    clock.set(3 * MS)
    assert clock.loop.next_timer == timer
    clock.loop.advance(10 * MS)
    assert clock.rang == [3 * MS]


def test_it_can_be_told_not_to_ring(clock: Clock) -> None:
    clock.set(3 * MS)
    clock.alarm.set(None)
    clock.loop.advance(10 * MS)
    assert clock.rang == [] and clock.loop.next_timer is None


def test_a_time_that_is_past_is_now(clock: Clock) -> None:
    clock.loop.pass_time(MS)
    clock.set(0)
    clock.loop.advance(MS)
    assert clock.rang == [MS + FakeLoop.TURN_NS]


def test_it_may_be_set_while_it_rings(clock: Clock) -> None:
    clock.every = MS
    clock.set(MS)
    clock.loop.advance(5 * MS + MS // 2)
    assert len(clock.rang) == 5
