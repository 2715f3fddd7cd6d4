"""The loop that stays awake."""

from __future__ import annotations

import pytest

from doubles import FakeLoop
from nerite.dispatch import busy_poll
from nerite.dispatch.busy_poll import BusyPoll

LIMIT = 400e-6


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    """A loop whose turns take 50 microseconds."""
    loop = FakeLoop()

    def time() -> float:
        loop.now_ns += 1
        return loop.time()

    monkeypatch.setattr(busy_poll, "monotonic", time)
    monkeypatch.setattr(busy_poll.os, "sched_yield", lambda: loop.pass_time(50_000))
    return loop


def turns(loop: FakeLoop) -> int:
    """Let the loop go on until it sleeps; return how often it looked."""
    before = loop.turns
    loop.settle()
    return loop.turns - before


def test_it_looks_for_as_long_as_agreed_and_then_sleeps(loop: FakeLoop) -> None:
    of = BusyPoll(loop, LIMIT)  # type: ignore[arg-type]
    of.event(False)
    assert turns(loop) == 0
    loop.pass_time(100_000)
    of.event(False)
    assert 8 <= turns(loop) <= 9
    # That was a long wait.
    of.event(False)
    assert turns(loop) == 0


def test_one_look_at_a_time_however_much_happens(loop: FakeLoop) -> None:
    of = BusyPoll(loop, LIMIT)  # type: ignore[arg-type]
    for _ in range(10):
        of.event(False)
    assert turns(loop) <= 9


def test_never(loop: FakeLoop) -> None:
    of = BusyPoll(loop, 0.0)  # type: ignore[arg-type]
    for _ in range(3):
        of.event(False)
        assert turns(loop) == 0


def test_work_comes_before_giving_way(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    of = BusyPoll(loop, LIMIT)  # type: ignore[arg-type]
    done: list[str] = []

    def give_way() -> None:
        done.append("gave way")
        loop.pass_time(500_000)

    monkeypatch.setattr(busy_poll.os, "sched_yield", give_way)
    of.event(False)
    of.event(False)
    of.soon(lambda: done.append("worked"))
    loop.settle()
    assert done == ["worked", "gave way"]
