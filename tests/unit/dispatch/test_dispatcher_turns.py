"""What the dispatcher starts in a turn of the loop: which requests run together, on which instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher_bench import MS, UNBOUNDED, US, Bench
from doubles import Caller, FakeLoop, request
from fake_instance import OK
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import BRIEF_NS, AnyInstancePicker
from nerite.instances.in_process import LoopInstance
from nerite.instances.instance import Batch
from nerite.scheduling.dynamic_batcher import DefaultScheduler
from nerite.scheduling.load_shedding import LoadShedder


def test_requests_of_one_turn_run_together(bench: Bench) -> None:
    of = bench.dispatcher()
    asked = bench.ask(of, 1, 2, 1)
    (instance,) = bench.instances
    assert instance.batches == []
    assert (of.pending, of.in_flight) == (3, 3)
    bench.loop.settle()
    assert bench.loop.turns == 1
    assert instance.batches == [asked]
    assert (of.pending, of.in_flight) == (0, 3)
    instance.finish()
    assert [bench.answer(each) for each in asked] == ["ok"] * 3
    assert (of.pending, of.in_flight) == (0, 0)


def test_every_free_instance_gets_a_batch(bench: Bench) -> None:
    of = bench.dispatcher(instances=3, max_batch_size=1)
    asked = bench.ask(of, *[1] * 4)
    bench.loop.settle()
    assert [instance.batch for instance in bench.instances] == [[asked[0]], [asked[1]], [asked[2]]]
    bench.instances[1].finish()
    assert bench.instances[1].batch == [asked[3]]


def test_an_instance_works_on_while_its_answers_are_sent(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (instance,) = bench.instances
    seen: list[Batch | None] = []
    bench.caller = Caller(lambda _: seen.append(instance.batch))
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    instance.finish()
    assert seen == [[second]]
    assert bench.answer(first) == "ok"


def test_what_is_asked_while_answers_are_sent_is_not_forgotten(bench: Bench) -> None:
    of = bench.dispatcher()
    more: list[InferenceRequest] = []

    def ask_again(answered: InferenceRequest) -> None:
        if not more:
            more.extend(bench.ask(of, 1))

    bench.caller = Caller(ask_again)
    bench.ask(of, 1)
    bench.loop.settle()
    bench.instances[0].finish()
    bench.loop.settle()
    assert bench.instances[0].batch == more


def test_an_instance_that_runs_at_once(bench: Bench) -> None:
    """``LoopInstance`` calls back before ``run`` returns, and callers ask again before that."""

    class Model:
        def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
            return [OK] * len(requests)

        def is_ready(self) -> bool:
            return True

        def close(self) -> None:
            pass

    left = 2000
    asked: list[InferenceRequest] = []

    def ask_again(answered: InferenceRequest) -> None:
        nonlocal left
        if left:
            left -= 1
            asked.append(request(sink=bench.caller))
            of.submit(asked[-1])

    bench.caller = Caller(ask_again)
    loop: Any = bench.loop
    instance, admission = LoopInstance("model_0", Model()), LoadShedder(UNBOUNDED, "model")
    of = Dispatcher(
        AnyInstancePicker(DefaultScheduler()), [instance], bench.statistics, loop, BusyPoll(loop, 0.0), admission
    )
    of.submit(request(sink=bench.caller))
    bench.loop.settle()
    assert len(bench.caller.answers) == 2001
    assert all(bench.answer(each) == "ok" for each in asked)
    assert (of.in_flight, bench.statistics.success.count) == (0, 2001)


def warm(bench: Bench, of: Dispatcher, took_ns: int) -> None:
    """Have each instance run one request that takes ``took_ns``."""
    for instance in bench.instances:
        bench.ask(of)
        bench.loop.settle()
        instance.finish(took_ns=took_ns)


def test_a_full_batch_goes_ahead_to_an_instance_whose_batches_are_brief(bench: Bench) -> None:
    of = bench.dispatcher(ahead=True, max_batch_size=2)
    warm(bench, of, BRIEF_NS - 1)
    (instance,) = bench.instances
    first, second, third = bench.ask(of, 2, 1, 1), bench.ask(of, 2), bench.ask(of, 1)
    bench.loop.settle()
    assert (instance.batch, instance.next) == (first[:1], first[1:])
    instance.finish()
    assert (instance.batch, instance.next) == (first[1:], second)
    instance.finish()
    assert (instance.batch, instance.next) == (second, None), "a batch that can grow does not go ahead"
    filling = bench.ask(of, 1)
    bench.loop.settle()
    assert instance.next == [*third, *filling], "it goes once it is full, though no instance came free"
    instance.finish()
    instance.finish()
    assert {bench.answer(each) for each in (*first, *second, *third, *filling)} == {"ok"}
    assert of.in_flight == 0


def test_nothing_goes_ahead_where_batches_take_long(bench: Bench) -> None:
    of = bench.dispatcher(ahead=True, max_batch_size=1)
    warm(bench, of, BRIEF_NS)
    bench.ask(of, 1, 1)
    bench.loop.settle()
    (instance,) = bench.instances
    assert (instance.batch is None, instance.next) == (False, None)
    assert of.pending == 1


def test_idle_instances_come_before_those_that_run(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, ahead=True, max_batch_size=1)
    warm(bench, of, 0)
    asked = bench.ask(of, 1, 1, 1, 1, 1)
    bench.loop.settle()
    assert [(instance.batch, instance.next) for instance in bench.instances] == [
        ([asked[0]], [asked[2]]),
        ([asked[1]], [asked[3]]),
    ]
    assert of.pending == 1


def test_what_went_ahead_is_answered_in_order(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, ahead=True, max_batch_size=1, preserve_ordering=True)
    warm(bench, of, 0)
    asked = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    bench.instances[1].finish()
    assert [bench.answer(each) for each in asked] == ["nothing yet"] * 3
    bench.instances[0].finish()
    assert [bench.answer(each) for each in asked] == ["ok", "ok", "nothing yet"]
    bench.instances[0].finish()
    assert bench.answer(asked[2]) == "ok"


def test_a_batch_waits_as_long_as_the_delay_and_no_longer(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=1500)
    asked = bench.ask(of, 1)
    bench.loop.advance(1500 * US - 1)
    assert bench.instances[0].batch is None
    bench.loop.advance(2 * FakeLoop.TURN_NS)
    assert bench.instances[0].batch == asked


def test_the_timer_follows_the_oldest(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, preferred_sizes=(4,))
    bench.ask(of, 1)
    bench.loop.advance(5 * MS)
    bench.ask(of, 1)
    bench.loop.advance(4 * MS)
    assert bench.instances[0].batch is None
    bench.loop.advance(MS + 2 * FakeLoop.TURN_NS)
    assert [each.header.batch_size for each in bench.instances[0].batch or ()] == [1, 1]


def test_a_waiting_batch_that_fills_up_goes_at_once(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, preferred_sizes=(2,))
    asked = bench.ask(of, 1)
    bench.loop.advance(MS)
    asked += bench.ask(of, 1)
    bench.loop.settle()
    assert bench.instances[0].batch == asked
    bench.instances[0].finish()
    turns = bench.loop.turns
    bench.loop.advance(100 * MS)
    assert bench.loop.turns <= turns + 1


def test_a_waiting_batch_that_fits_better_without_one_that_gave_up_goes_at_once(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=8, max_delay_us=10_000, preferred_sizes=(4, 8))
    one, two, other = bench.ask(of, 1, 2, 2)
    bench.loop.settle()
    assert bench.instances[0].batch is None
    one.cancel()
    bench.loop.settle()
    assert bench.instances[0].batch == [two, other]


def test_nobody_is_awake_while_a_batch_waits(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=50_000)
    bench.ask(of, 1)
    bench.loop.advance(49 * MS)
    assert bench.loop.turns <= 2
    bench.loop.advance(2 * MS)
    # The timer counts whole milliseconds; for less than one it is asked again and again.
    assert bench.loop.turns <= 2 + MS // FakeLoop.TURN_NS + 2


def test_nobody_is_awake_while_the_only_instance_is_down(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=5_000)
    asked = bench.ask(of, 1)
    bench.loop.advance(MS)
    bench.instances[0].die()
    bench.loop.advance(1000 * MS)
    assert bench.loop.turns < 200
    bench.instances[0].come_back()
    bench.loop.settle()
    assert bench.instances[0].batch == asked
