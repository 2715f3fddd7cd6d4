"""Instances of the dispatcher that come, go and die."""

from __future__ import annotations

import pytest

from dispatcher_bench import MS, Bench
from fake_instance import FakeInstance
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.response import EMPTY
from nerite.observability.statistics import RequestOutcome


def test_an_instance_that_dies_fails_its_batch_and_nothing_else(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    asked = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    bench.instances[0].die()
    assert [bench.answer(each) for each in asked] == ["Internal: died", "Internal: died", "nothing yet"]
    assert bench.statistics.failures[RequestOutcome.WORKER_DIED] == 2
    bench.loop.advance(1000 * MS)
    bench.instances[0].come_back()
    bench.loop.settle()
    assert bench.instances[0].batch == [asked[2]]


def test_an_idle_instance_that_dies_gets_nothing(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1)
    bench.instances[0].die()
    asked = bench.ask(of, 1, 1)
    bench.loop.settle()
    assert (bench.instances[0].batch, bench.instances[1].batch) == (None, [asked[0]])


def test_nobody_waits_for_instances_that_cannot_be_started(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    for instance in bench.instances:
        instance.die()
    (early,) = bench.ask(of, 1)
    bench.instances[0].fail_to_come_back()
    assert bench.answer(early) == "nothing yet"
    bench.instances[1].fail_to_come_back("another reason")
    told = "Unavailable: no instance of the model can be started: no such file"
    assert bench.answer(early) == told
    (late,) = bench.ask(of, 1)
    assert bench.answer(late) == told
    bench.instances[1].come_back()
    asked = bench.ask(of, 1)
    bench.loop.settle()
    assert bench.instances[1].batch == asked
    assert of.in_flight == 1


def test_requests_wait_for_an_instance_that_works_though_the_others_cannot_be_started(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    bench.ask(of, 1)
    bench.loop.settle()
    bench.instances[1].die()
    bench.instances[1].fail_to_come_back()
    asked = bench.ask(of, 1)
    bench.loop.settle()
    assert bench.answer(asked[0]) == "nothing yet"
    bench.instances[0].finish()
    assert bench.instances[0].batch == asked


def test_whether_requests_come_to_an_end_is_told_when_it_changes(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    told: list[bool] = []
    of.on_usable = lambda: told.append(of.makes_progress)
    first, second = bench.instances
    first.die()
    second.die()
    first.fail_to_come_back()
    second.fail_to_come_back()
    assert told == [True, False, False, True], "who comes then is refused, and does not wait for ever"
    second.come_back()
    second.die()
    of.add(FakeInstance("model_2"))
    assert told[4:] == [True, False, True]


def test_one_more_instance_takes_what_waits(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    more = FakeInstance("model_1")
    of.add(more)
    assert (bench.instances[0].batch, more.batch) == ([first], [second])


def test_an_idle_instance_leaves_at_once(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    left: list[object] = []
    of.remove(bench.instances[0], left.append)
    assert left == [bench.instances[0]]
    (asked,) = bench.ask(of)
    bench.loop.settle()
    assert [instance.batch for instance in bench.instances] == [None, [asked]]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_instance_that_runs_leaves_when_it_has_finished(bench: Bench, ahead: bool) -> None:
    of = bench.dispatcher(instances=2, ahead=ahead, max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    leaving, staying = bench.instances
    left: list[object] = []
    of.remove(leaving, left.append)
    (third,) = bench.ask(of)
    leaving.finish()
    bench.loop.settle()
    assert left == [leaving]
    assert [bench.answer(each) for each in (first, second, third)] == ["ok", "nothing yet", "nothing yet"]
    staying.finish()
    bench.loop.settle()
    assert staying.batch == [third]
    assert leaving.batches == [[first]]


def test_an_instance_leaves_after_its_last_response(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    (asked,) = bench.ask(of)
    bench.loop.settle()
    leaving = bench.instances[0]
    leaving.finish([None])
    left: list[object] = []
    of.remove(leaving, left.append)
    assert left == []
    asked.cancel()
    assert leaving.told == [("cancel", asked)]
    leaving.part(asked, EMPTY, True, ExecutionTimes())
    bench.loop.settle()
    assert left == [leaving]


def test_an_instance_that_dies_on_its_way_out(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    (asked,) = bench.ask(of)
    bench.loop.settle()
    leaving, staying = bench.instances
    left: list[object] = []
    of.remove(leaving, left.append)
    leaving.die()
    bench.loop.settle()
    assert left == [leaving]
    assert bench.answer(asked) == "Internal: died"
    (another,) = bench.ask(of)
    bench.loop.settle()
    assert staying.batch == [another]
