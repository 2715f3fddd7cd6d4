"""Closed and open loops with slots that answer at once, or never."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from time import perf_counter

import pytest

from nerite.tools.bench.forms import Dialogue, Script
from nerite.tools.bench.http_generator import Recorder, RequestSlot, Totals
from nerite.tools.bench.loops import Agenda, ClosedLoop, LoadLoop, OpenLoop


class Talk(Dialogue):
    """Conversations of three requests, with a pause before each further one."""

    def __init__(self, cancel_after: float | None = None, pause: float = 0.001, turns: int = 3) -> None:
        super().__init__()
        self.cancel_after = cancel_after
        self.turns = turns
        self.sent = 0
        self.wait = pause
        self.ends = 0

    def following(self) -> bytes:
        self.sent = self.sent % self.turns + 1
        return b""

    def pause(self) -> float | None:
        if self.sent < self.turns:
            return self.wait
        self.ends += 1
        return None

    def broken(self) -> None:
        self.sent = self.turns


class Slot(RequestSlot):
    """Answers in the next round of the event loop, or never."""

    def __init__(self, work: LoadLoop, dialogue: Talk | None = None, *, silent: bool = False) -> None:
        super().__init__(work, Script(dialogue.following if dialogue else lambda: b"", dialogue=dialogue))
        self.silent = silent
        self.begun: list[float] = []

    def ask(self) -> None:
        self.next()
        self.begun.append(self.due)
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.work.answered, self)

    def abandon(self, reason: str) -> None:
        self.work.failed(self, reason)

    def cancel(self) -> None:
        self.work.cancelled(self)

    def close(self) -> None:
        """Do nothing."""


def totals(work: LoadLoop) -> Totals:
    work.recorder.take()
    return work.recorder.totals


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_a_closed_loop_ends_after_its_budget(slots: int) -> None:
    async def run() -> None:
        work = ClosedLoop(Recorder(), budget=10)
        work.begin([Slot(work) for _ in range(slots)])
        await until(lambda: work.done)
        assert totals(work) == Totals(answered=10)

    asyncio.run(run())


def test_a_loop_without_budget_has_no_end() -> None:
    async def run() -> None:
        work = ClosedLoop(Recorder())
        slot = Slot(work)
        work.begin([slot])
        await until(lambda: len(slot.begun) > 100)
        assert not work.done
        work.end()

    asyncio.run(run())


def test_an_open_loop_ends_with_its_schedule() -> None:
    async def run() -> None:
        work = OpenLoop(Recorder(), iter([0.0, 0.01, 0.011, 0.05]), began := perf_counter(), lambda: None)
        slots = [Slot(work), Slot(work)]
        work.begin(slots)
        await until(lambda: work.done)
        due = sorted(itertools.chain(*(slot.begun for slot in slots)))
        assert [moment - began for moment in due] == pytest.approx([0.0, 0.01, 0.011, 0.05])
        assert totals(work) == Totals(answered=4)

    asyncio.run(run())


def test_a_conversation_keeps_its_slot_and_pauses() -> None:
    async def run() -> None:
        talks = [Talk(pause=0.02), Talk(pause=0.02)]
        work = ClosedLoop(Recorder(), budget=2)
        slots = [Slot(work, talk) for talk in talks]
        work.begin(slots)
        await until(lambda: work.done)
        assert [talk.ends for talk in talks] == [1, 1]
        for slot in slots:
            assert len(slot.begun) == 3
            assert all(after - before >= 0.02 for before, after in itertools.pairwise(slot.begun))
        assert totals(work) == Totals(answered=6)

    asyncio.run(run())


def test_an_arrival_of_an_open_loop_is_a_conversation() -> None:
    async def run() -> None:
        work = OpenLoop(Recorder(), iter([0.0, 0.001]), perf_counter(), lambda: None)
        # The second arrival waits for the only slot, and that for its conversation.
        slot = Slot(work, Talk(pause=0.01))
        work.begin([slot])
        await until(lambda: work.done)
        assert len(slot.begun) == 6
        assert slot.begun[3] < slot.begun[2]
        assert totals(work) == Totals(answered=6)

    asyncio.run(run())


@pytest.mark.parametrize("open_loop", [False, True])
def test_requests_are_cancelled_in_time(open_loop: bool) -> None:
    async def run() -> None:
        work: LoadLoop
        if open_loop:
            work = OpenLoop(Recorder(), iter([0.0, 0.001, 0.002]), perf_counter(), lambda: None)
        else:
            work = ClosedLoop(Recorder(), budget=3)
        slot = Slot(work, Talk(cancel_after=0.01), silent=True)
        work.begin([slot])
        await until(lambda: work.done)
        assert totals(work) == Totals(cancelled=3)
        assert len(slot.begun) == 3

    asyncio.run(run())


def test_an_answer_is_not_cancelled_and_neither_is_the_next_request() -> None:
    async def run() -> None:
        work = ClosedLoop(Recorder(), budget=40)
        slot = Slot(work, Talk(cancel_after=0.002, turns=1))
        work.begin([slot])
        await until(lambda: work.done)
        await asyncio.sleep(0.01)
        assert totals(work) == Totals(answered=40)

    asyncio.run(run())


def test_slots_of_a_ramp_begin_one_after_the_other() -> None:
    async def run() -> None:
        work = ClosedLoop(Recorder(), budget=3, delays=iter([0.0, 0.02, 0.04]))
        slots = [Slot(work, silent=True) for _ in range(3)]
        began = perf_counter()
        work.begin([*slots])
        await until(lambda: all(slot.begun for slot in slots))
        assert [slot.begun[0] - began for slot in slots] == sorted(slot.begun[0] - began for slot in slots)
        assert slots[2].begun[0] - began >= 0.04
        work.end()

    asyncio.run(run())


def test_an_agenda_keeps_the_order_of_times() -> None:
    async def run() -> None:
        agenda, told = Agenda(), list[str]()
        now = perf_counter()
        agenda.at(now + 0.02, lambda: told.append("last"))
        agenda.at(now + 0.01, lambda: told.append("first"))
        agenda.at(now + 30, lambda: told.append("never"))
        await until(lambda: len(told) == 2)
        agenda.close()
        assert told == ["first", "last"]

    asyncio.run(run())
