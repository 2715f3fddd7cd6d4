"""Barrier, dead letters and progress of a loop, with a clock that only moves when it is told."""

from __future__ import annotations

import pytest

from nerite.core.errors import NotFound, RefusedData, Unavailable
from nerite.core.failures import internal_errors
from nerite.core.work_loop import STALL_SECONDS, WorkLoop, WorkLoops


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(loop: WorkLoop, unit: str, error: Exception) -> None:
    with loop.unit(unit, "alice"):
        raise error


def test_a_unit_that_raises_twice_is_set_aside_and_others_go_on(clock: Clock) -> None:
    loop = WorkLoop("batches", clock=clock)
    before = internal_errors.counts["loop"]
    fail(loop, "a", TypeError("Recursion limit reached"))
    assert not loop.admits("a") and loop.admits("b") and loop.dead_letters == []
    clock.now += 0.5
    assert loop.admits("a")
    fail(loop, "a", TypeError("Recursion limit reached"))
    (letter,) = loop.dead_letters
    assert (letter.unit, letter.tenant) == ("a", "alice")
    assert "incident" in letter.text
    assert loop.is_set_aside("a") and loop.failing == {}
    clock.now += 3600
    assert not loop.admits("a") and loop.admits("b")
    assert loop.failures == 2 == internal_errors.counts["loop"] - before


def test_a_unit_that_succeeds_between_is_not_set_aside(clock: Clock) -> None:
    loop = WorkLoop("batches", clock=clock)
    for _ in range(5):
        fail(loop, "a", ValueError())
        clock.now += 1
        with loop.unit("a"):
            pass
    assert loop.dead_letters == [] and loop.admits("a")


def test_an_error_of_the_environment_never_sets_a_unit_aside_and_rests_grow(clock: Clock) -> None:
    loop = WorkLoop("ledger", clock=clock)
    rests = []
    for _ in range(10):
        fail(loop, "a", Unavailable("the database failed"))
        began = clock.now
        while not loop.admits("a"):
            clock.now += 0.5
        rests.append(clock.now - began)
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert (loop.dead_letters, loop.failing, loop.failures) == ([], {"a": "the database failed"}, 0)


def test_data_that_a_store_refuses_is_poison(clock: Clock) -> None:
    loop = WorkLoop("ledger", clock=clock)
    for _ in range(2):
        fail(loop, "a", RefusedData("text fields cannot contain NUL"))
    assert loop.is_set_aside("a")


def test_a_step_is_never_set_aside(clock: Clock) -> None:
    loop = WorkLoop("rollouts", clock=clock)
    for _ in range(5):
        with loop.step("files"):
            raise ZeroDivisionError
    assert (loop.dead_letters, loop.failures, list(loop.failing)) == ([], 5, ["files"])
    with loop.step("files"):
        pass
    assert loop.failing == {}


def test_an_operator_has_a_dead_letter_tried_again_or_discards_it(clock: Clock) -> None:
    loop = WorkLoop("batches", clock=clock)
    discarded: list[str] = []
    woken: list[str] = []
    loop.on_discard = discarded.append
    loop.woken = lambda: woken.append("woken")
    loops = WorkLoops()
    loops.add(loop)
    with pytest.raises(NotFound, match="no unit 'a' of 'batches' was set aside"):
        loops.of_unit("batches", "a")
    for unit in ("a", "a", "b", "b"):
        fail(loop, unit, ValueError())
    loops.of_unit("batches", "a").retry("a")
    assert loop.admits("a") and not discarded
    loops.of_unit("batches", "b").discard("b")
    assert (discarded, woken, loop.dead_letters) == (["b"], ["woken"] * 2, [])


def test_a_loop_with_work_that_does_not_advance_is_stalled(clock: Clock) -> None:
    waiting = 0
    loop = WorkLoop("batches", waiting=lambda: waiting, essential=True, clock=clock)
    loops = WorkLoops()
    loops.add(loop)
    loops.add(loop)
    assert len([*loops]) == 1
    clock.now += 10 * STALL_SECONDS
    loops.watch()
    assert loop.problem == loops.obstacle == ""  # it has nothing to do
    waiting = 3
    clock.now += STALL_SECONDS - 1
    loops.watch()
    assert loop.problem == ""
    clock.now += 2
    with loop.step("claims"):
        raise Unavailable("the disk is full")
    loops.watch()
    assert loop.problem == "nothing has advanced for 31s while 3 wait: claims: the disk is full"
    assert loops.obstacle == "batches is stalled"
    with loop.unit("a"):
        pass
    loops.watch()
    assert loop.problem == loops.obstacle == ""


def test_a_stall_is_logged_now_and_then(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="nerite.background")
    loop = WorkLoop("batches", clock=clock)
    for _ in range(1200):
        clock.now += 1
        loop.watch()
    assert [record.getMessage() for record in caplog.records] == [
        "batches is stalled: nothing has advanced for 30s while 1 wait",
        "batches is stalled: nothing has advanced for 10m30s while 1 wait",
    ]
    loop.advanced()
    loop.watch()
    loop.watch()
    assert [record.getMessage() for record in caplog.records[2:]] == ["batches makes progress again"]


def test_restarts_without_progress_are_no_progress(clock: Clock) -> None:
    loop = WorkLoop("polling", waiting=lambda: 0, clock=clock)
    assert [loop.restarted(ValueError("x")) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    loop.watch()
    assert loop.problem == "it was restarted 7 times without progress: ValueError: x"
    loop.advanced()
    loop.watch()
    assert (loop.problem, loop.restarts) == ("", 7)
