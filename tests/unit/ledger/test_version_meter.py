"""The meter of a model version: who is charged with what, and that it adds up."""

from __future__ import annotations

import gc
import itertools
import random

import pytest

from doubles import Caller as Sink
from doubles import header
from fake_instance import OK, FakeInstance
from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import Cancelled, Internal, NeriteError, QuotaExceeded
from nerite.core.execution_observer import ExecutionTimes, TraceContext
from nerite.core.item_attempt import new_attempt, new_batch_id
from nerite.core.model_calls import ChildRequest
from nerite.core.request import NOBODY, Assignment, Caller, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.ledger.meter import MeterSession, RequestAccount, VersionMeter
from nerite.ledger.row import Ending, LedgerRow, Origin, WallClock, summed


class Meter:
    """A meter with instances, and the rows that it made."""

    def __init__(self, instances: int = 1, *, engine: bool = False) -> None:
        self.rows: list[LedgerRow] = []
        self.wall = WallClock(0)
        session = MeterSession(
            self.rows.append,
            self.rows.append,
            itertools.count(1),
            self.wall,
            lambda who: (who.tenant, f"class of {who.tenant}"),
        )
        self.of = VersionMeter("model", "1", session)
        self.instances = [FakeInstance(f"model_{number}") for number in range(instances)]
        for instance in self.instances:
            if engine:
                instance.report = EngineReport()
            self.of.opened(instance, 0)

    def ask(self, rows: int = 1, caller: Caller | None = None, arrived: int = 0) -> InferenceRequest:
        made = InferenceRequest(header(rows=rows), [], Sink(), arrived)
        made.header.caller = caller
        made.header.batch_size = rows
        self.of.open(made)
        return made

    def run(self, batch: list[InferenceRequest], began: int, ended: int, which: int = 0) -> None:
        self.of.leased(self.instances[which], batch, began)
        self.of.returned(self.instances[which], batch, times(began, ended), ended)

    def balanced(self, now: int) -> None:
        """Assert that what was used is in rows and accounts, and the rest idle."""
        read = self.of.times(now)
        assert self.of.unaccounted_ns == 0
        for each in read:
            assert each.idle_ns + each.used_ns == pytest.approx((each.until - each.since) * 1e9)
        running = sum(row.amounts.busy_ns for row in self.of.running_rows(now))
        over = sum(row.amounts.busy_ns for row in self.rows)
        assert over + running <= sum(each.used_ns for each in read)


def times(began: int, ended: int, *, failed: bool = False) -> ExecutionTimes:
    made = ExecutionTimes()
    made.started_ns, made.ended_ns, made.failed = began, ended, failed
    return made


def answer(request: InferenceRequest, error: NeriteError | None = None) -> None:
    request.respond(OK if error is None else InferenceResponse.failed(error))


def test_a_batch_is_divided_by_rows() -> None:
    meter = Meter()
    small, large = meter.ask(1), meter.ask(3)
    meter.run([small, large], 100, 140)
    answer(small)
    answer(large)
    assert [(row.amounts.compute_ns, row.amounts.queue_ns) for row in meter.rows] == [(10, 100), (30, 100)]
    assert {row.key.ending for row in meter.rows} == {Ending.ANSWERED}
    meter.balanced(200)


def test_a_request_that_is_over_is_not_kept() -> None:
    meter = Meter()
    asked = meter.ask()
    meter.run([asked], 1, 2)
    answer(asked)
    assert not any(isinstance(each, RequestAccount) for each in gc.get_referrers(asked))


def test_who_asked_is_in_the_row() -> None:
    meter = Meter()
    asked = meter.ask(caller=Caller("acme"))
    asked.header.assignment = Assignment("route", "model:1", False, 0.5)
    meter.run([asked], 1, 2)
    answer(asked)
    (row,) = meter.rows
    assert row.key[:7] == ("acme", "model", "1", "route", "model:1", "class of acme", Origin.CLIENT)


def test_a_call_is_charged_to_whoever_caused_it() -> None:
    meter = Meter()
    parent = InferenceRequest(header(), [], Sink(), 0)
    parent.header.caller = Caller("acme")
    child = ChildRequest(parent, header(), [], Sink(), 0)
    meter.of.open(child)
    meter.run([child], 1, 2)
    answer(child)
    assert [(row.key.tenant, row.key.origin) for row in meter.rows] == [("acme", Origin.CALL)]


@pytest.mark.parametrize(
    ("error", "begun", "ending"),
    [
        (None, False, Ending.CACHED),
        (QuotaExceeded("no"), False, Ending.REFUSED),
        (Internal("no"), True, Ending.FAILED),
        (Cancelled(""), True, Ending.CANCELLED),
        (Cancelled(""), False, Ending.CANCELLED),
    ],
)
def test_how_requests_end(error: NeriteError | None, begun: bool, ending: Ending) -> None:
    meter = Meter()
    asked = meter.ask()
    if begun:
        meter.run([asked], 1, 2)
    answer(asked, error)
    assert [row.key.ending for row in meter.rows] == [ending]


def test_a_request_to_an_ensemble_is_answered_without_an_instance() -> None:
    meter = Meter(0)
    answer(meter.ask())
    assert [(row.key.ending, row.amounts.busy_ns) for row in meter.rows] == [(Ending.ANSWERED, 0)]


def test_a_request_that_was_answered_early_has_its_row_when_the_instance_is_done() -> None:
    meter = Meter()
    asked = meter.ask()
    meter.of.leased(meter.instances[0], [asked], 10)
    asked.cancel()
    answer(asked, Cancelled(""))
    assert meter.rows == []
    meter.of.returned(meter.instances[0], [asked], times(10, 50), 50)
    (row,) = meter.rows
    assert (row.key.ending, row.amounts.compute_ns) == (Ending.CANCELLED, 40)


def test_a_batch_that_died_is_charged() -> None:
    meter = Meter()
    asked = meter.ask()
    meter.of.leased(meter.instances[0], [asked], 10)
    meter.of.returned(meter.instances[0], [asked], None, 35)
    answer(asked, Internal("the worker died"))
    (row,) = meter.rows
    assert (row.key.ending, row.amounts.compute_ns) == (Ending.FAILED, 25)
    meter.balanced(100)


def test_time_that_nobody_asked_for_has_a_row_of_the_server() -> None:
    meter = Meter()
    meter.run([InferenceRequest(header(), [], NOBODY, 0)], 10, 30)
    (row,) = meter.rows
    assert (row.key.origin, row.amounts.requests, row.amounts.compute_ns) == (Origin.SERVER, 0, 20)
    meter.balanced(50)


def test_a_step_that_followed_another_model_has_rows() -> None:
    meter = Meter()
    asked = [InferenceRequest(header(), [], Sink(), 0) for _ in range(2)]
    meter.of.followed(asked, times(10, 30), 40)
    assert [row.amounts.compute_ns for row in meter.rows] == [10, 10]
    meter.balanced(50)


def test_a_request_that_joined_another_costs_nothing() -> None:
    meter = Meter()
    meter.of.joined(InferenceRequest(header(), [], Sink(), 0))
    assert [(row.key.ending, row.amounts.busy_ns) for row in meter.rows] == [(Ending.JOINED, 0)]


class Engine(Meter):
    """A meter of an engine that reports its steps."""

    def __init__(self) -> None:
        super().__init__(engine=True)

    def begin(self) -> InferenceRequest:
        asked = self.ask()
        self.of.leased(self.instances[0], [asked], 1)
        self.of.returned(self.instances[0], [asked], times(1, 2), 2)
        return asked

    def step(self, progress: list[RequestProgress], began: int, ended: int, **report: int) -> None:
        made = EngineReport(progress=progress, block_size=4, step_began_ns=began, step_ended_ns=ended, **report)
        self.of.reported(self.instances[0], made, ended)


def begun(request: InferenceRequest, at: int) -> RequestProgress:
    return RequestProgress(request, 0, RequestBegun(at, 8))


def test_prefill_and_decode() -> None:
    engine = Engine()
    asked = engine.begin()
    engine.step([begun(asked, 10), RequestProgress(asked, 1)], 10, 30)
    engine.step([RequestProgress(asked, 1)], 30, 35)
    engine.step([RequestProgress(asked, 1, None, RequestEnded.STOP)], 35, 41)
    answer(asked)
    (row,) = engine.rows
    assert (row.amounts.prefill_ns, row.amounts.decode_ns, row.amounts.compute_ns) == (20, 11, 0)
    assert (row.amounts.prompt_tokens, row.amounts.answer_tokens, row.amounts.queue_ns) == (8, 3, 10)
    assert row.amounts.kv_block_ns == 2 * 20 + 3 * 5 + 3 * 6
    engine.balanced(100)


def test_the_steps_of_an_engine_that_does_not_time_them_follow_each_other() -> None:
    engine = Engine()
    asked = engine.begin()
    report = engine.of.reported
    report(engine.instances[0], EngineReport(progress=[begun(asked, 100)]), 110)
    report(engine.instances[0], EngineReport(progress=[RequestProgress(asked, 1)]), 150)
    report(engine.instances[0], EngineReport(progress=[RequestProgress(asked, 1, None, RequestEnded.STOP)]), 160)
    answer(asked)
    assert engine.rows[0].amounts.prefill_ns == 50
    assert engine.rows[0].amounts.decode_ns == 10
    engine.balanced(200)


def test_the_engine_works_on_for_a_client_that_has_gone() -> None:
    engine = Engine()
    asked = engine.begin()
    engine.step([begun(asked, 10), RequestProgress(asked, 1)], 10, 20)
    asked.cancel()
    answer(asked, Cancelled(""))
    assert engine.rows == []
    engine.step([RequestProgress(asked, 0, None, RequestEnded.CANCELLED)], 20, 30)
    (row,) = engine.rows
    assert (row.key.ending, row.amounts.busy_ns) == (Ending.CANCELLED, 20)


def test_an_engine_that_dies_took_the_time_of_its_requests() -> None:
    engine = Engine()
    one, other = engine.begin(), engine.begin()
    both = [begun(one, 10), begun(other, 10), RequestProgress(one, 1), RequestProgress(other, 1)]
    engine.step(both, 10, 20, running=2)
    engine.of.reported(engine.instances[0], None, 50)
    for each in (one, other):
        answer(each, Internal("the worker died"))
    assert sum(row.amounts.busy_ns for row in engine.rows) == 40
    assert {row.key.ending for row in engine.rows} == {Ending.FAILED}
    engine.balanced(100)


def test_an_idle_engine_is_idle() -> None:
    engine = Engine()
    engine.step([], 5, 9)
    (read,) = engine.of.times(100)
    assert (read.idle_ns, read.used_ns) == (100, 0)


def test_a_request_that_waits_for_its_first_step_keeps_the_time_open() -> None:
    engine = Engine()
    asked = engine.begin()
    (read,) = engine.of.times(50)
    assert read.until == 0
    engine.step([begun(asked, 60), RequestProgress(asked, 1, None, RequestEnded.LENGTH)], 10, 60)
    answer(asked)
    assert engine.rows[0].amounts.prefill_ns == 50


def test_rows_of_running_requests_are_replaced_by_their_last() -> None:
    meter = Meter()
    asked = meter.ask()
    meter.run([asked], 10, 20)
    (shown,) = meter.of.running_rows(25)
    assert (shown.key.ending, shown.amounts.compute_ns) == (Ending.RUNNING, 10)
    assert meter.of.running_rows(30) == []
    answer(asked)
    assert meter.rows[0].number == shown.number


def test_it_is_over_when_everything_was_read() -> None:
    meter = Meter()
    asked = meter.ask()
    meter.run([asked], 10, 20)
    meter.of.close()
    meter.of.closed(meter.instances[0], 30)
    answer(asked)
    assert not meter.of.over
    (last,) = meter.of.times(40)
    assert (last.idle_ns, last.used_ns) == (20, 10)
    assert meter.of.over


@pytest.mark.parametrize("seed", range(20))
def test_it_adds_up_whatever_happens(seed: int) -> None:
    """Batches overlap, die, and are answered early, late and in the middle; every nanosecond is somewhere."""
    chance = random.Random(seed)
    meter = Meter(3)
    now, running, asked, count = 0, [], [], 0
    for _ in range(400):
        now += chance.randrange(1, 50)
        event = chance.randrange(6)
        if event < 2:
            batch = [meter.ask(chance.randrange(1, 5), arrived=now) for _ in range(chance.randrange(1, 4))]
            count += len(batch)
            which = chance.randrange(3)
            meter.of.leased(meter.instances[which], batch, now)
            running.append((which, batch, now))
            asked += batch
        elif event == 2 and running:
            which, batch, began = running.pop(chance.randrange(len(running)))
            died = chance.random() < 0.2
            meter.of.returned(meter.instances[which], batch, None if died else times(began, now), now)
        elif event == 3 and asked:
            answer(asked.pop(chance.randrange(len(asked))), chance.choice([None, Cancelled(""), Internal("")]))
        elif event == 4:
            meter.balanced(now)
    for which, batch, began in running:
        meter.of.returned(meter.instances[which], batch, times(began, now), now)
    for each in asked:
        answer(each)
    used = sum(each.used_ns for each in meter.of.times(now))
    assert sum(row.amounts.busy_ns for row in meter.rows) == used
    assert sum(row.amounts.requests for row in meter.rows) == count
    assert meter.of.unaccounted_ns == 0
    whole = summed(meter.rows)
    assert sum(row.amounts.busy_ns for row in whole) == used
    assert sum(row.amounts.requests for row in whole) == count


class Sender(Sink):
    """A caller that says what it calls the request."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.outer_span = TraceContext(0, 0, request_id=request_id)


@pytest.mark.parametrize("trusted", [True, False])
def test_ids_of_items_are_believed_of_routers_and_the_server_itself(trusted: bool) -> None:
    """They are in rows of what the item causes, too. Of a client they would say that it does not pay."""
    meter, step = Meter(), Meter()
    attempt = new_attempt(new_batch_id(), 1)
    for name in (attempt, "ff-1"):
        asked = InferenceRequest(header(), [], Sender(name), 0)
        asked.header.caller = Caller("acme", trusted=trusted)
        meter.of.open(asked)
        child = ChildRequest(asked, header(), [], Sink(), 0)
        step.of.open(child)
        for where, each in ((step, child), (meter, asked)):
            where.run([each], 1, 2)
            answer(each)
    assert [row.request_id for row in meter.rows] == [attempt if trusted else "", "ff-1"]
    assert [row.request_id for row in step.rows] == [attempt if trusted else "", ""]


def test_rows_and_times_follow_the_clock_of_the_machine_after_it_was_set() -> None:
    meter = Meter()
    hour, day = 3600 * 10**9, 86_400 * 10**9
    meter.wall.offset_ns = day + hour
    meter.run([meter.ask(arrived=0)], 0, 10**9)
    (before,) = meter.of.times(10**9)
    meter.wall.offset_ns += 2 * hour
    for request in (asked := [meter.ask(arrived=10**9)]):
        meter.run(asked, 10**9, 2 * 10**9)
        request.respond(OK)
    (after,) = meter.of.times(2 * 10**9)
    assert meter.rows[-1].started == (day + 3 * hour) / 1e9 + 1
    assert (before.number, before.day) == (after.number, after.day) == (before.number, 1)
    assert after.until - after.since == 2.0, "the time of the instance is not that of the clock that was set"
    meter.wall.offset_ns = hour  # a day back: the time of the day before is a row of its own
    (back,) = meter.of.times(4 * 10**9)
    assert (back.day, back.until - back.since, back.idle_ns) == (0, 2.0, 2 * 10**9)
    assert back.number != after.number
