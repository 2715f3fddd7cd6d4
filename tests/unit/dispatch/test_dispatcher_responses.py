"""Responses that the dispatcher passes on: one by one, in order, to those who still want them."""

from __future__ import annotations

import pytest

from dispatcher_bench import Bench
from doubles import request
from fake_instance import OK, FakeInstance
from nerite.config.options import TraceOptions
from nerite.core.errors import Cancelled, Internal
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.response import EMPTY, InferenceResponse
from nerite.observability.statistics import RequestOutcome
from nerite.observability.trace import Trace
from nerite.observability.tracing import Tracing, trace_events


def test_responses_that_come_one_by_one(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (instance,) = bench.instances
    (asked,) = bench.ask(of)
    bench.loop.settle()
    instance.part(asked, OK, False, ExecutionTimes())
    instance.finish([None])
    assert (of.in_flight, of.pending) == (1, 0), "the instance is free, the request is not over"
    told = bench.drained(of)
    (other,) = bench.ask(of)
    bench.loop.settle()
    instance.finish()
    assert bench.answer(other) == "ok"
    instance.part(asked, OK, False, ExecutionTimes())
    instance.part(asked, EMPTY, True, ExecutionTimes())
    assert len(bench.caller.of(asked)) == 3
    assert (of.in_flight, len(told)) == (0, 1)


def test_a_last_response_may_come_before_execute_returns(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (instance,) = bench.instances
    (asked,) = bench.ask(of)
    bench.loop.settle()
    instance.part(asked, OK, True, ExecutionTimes())
    assert of.in_flight == 1, "the instance is at work still"
    instance.finish([None])
    assert of.in_flight == 0
    assert bench.answer(asked) == "ok"


def test_each_request_of_a_batch_counts_once(bench: Bench) -> None:
    """One had its last response while the batch ran, one gets it later, one was answered by what was returned."""
    of = bench.dispatcher(max_batch_size=3)
    (instance,) = bench.instances
    early, late, returned = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    instance.part(early, OK, True, ExecutionTimes())
    assert bench.statistics.success.count == 1
    instance.part(late, OK, False, ExecutionTimes())
    instance.finish([None, None, OK])
    assert (bench.statistics.success.count, bench.statistics.execution_count) == (2, 1)
    assert (of.in_flight, bench.answer(returned)) == (1, "ok")
    late.cancel()
    instance.part(late, EMPTY, True, ExecutionTimes())
    assert (bench.statistics.success.count, bench.statistics.failures[RequestOutcome.CANCELED], of.in_flight) == (
        2,
        1,
        0,
    )
    assert list(bench.statistics.batches) == [3]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_cancelled_request_that_the_model_stops_is_no_success(bench: Bench, ordered: bool) -> None:
    of = bench.dispatcher(max_batch_size=4, preserve_ordering=ordered)
    (instance,) = bench.instances
    asked = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    asked[1].cancel()
    instance.finish([OK, InferenceResponse.failed(Cancelled("stopped")), InferenceResponse.failed(Internal("bad"))])
    counted = bench.statistics
    assert (counted.success.count, counted.fail.count, counted.failures[RequestOutcome.CANCELED]) == (2, 1, 1)
    assert (counted.inference_count, counted.execution_count, list(counted.batches)) == (2, 1, [3])
    assert of.in_flight == 0


def test_a_stream_that_the_model_stops_is_no_success(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (instance,) = bench.instances
    (asked,) = bench.ask(of)
    bench.loop.settle()
    instance.part(asked, OK, False, ExecutionTimes())
    asked.cancel()
    instance.finish([InferenceResponse.failed(Cancelled("stopped"))])
    counted = bench.statistics
    assert (counted.success.count, counted.failures[RequestOutcome.CANCELED], of.in_flight) == (0, 1, 0)


def test_a_batch_that_dies_fails_what_it_had_not_ended(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    (instance,) = bench.instances
    ended, running = bench.ask(of, 1, 1)
    bench.loop.settle()
    instance.part(ended, OK, True, ExecutionTimes())
    instance.part(running, OK, False, ExecutionTimes())
    instance.die()
    assert (bench.statistics.success.count, bench.statistics.failures[RequestOutcome.WORKER_DIED], of.in_flight) == (
        1,
        1,
        0,
    )
    assert [final for asked, _, final in bench.caller.answers if asked is running] == [False, True]


def test_a_late_response_keeps_its_place(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, preserve_ordering=True)
    (instance,) = bench.instances
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    instance.finish([None])
    instance.finish()
    assert [bench.answer(each) for each in (first, second)] == ["nothing yet"] * 2
    instance.part(first, OK, True, ExecutionTimes())
    assert [bench.answer(each) for each in (first, second)] == ["ok", "ok"]


def test_the_model_is_told_of_who_gave_up_and_of_who_has_enough(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (instance,) = bench.instances
    (asked,) = bench.ask(of)
    bench.loop.settle()
    asked.pause(True)
    instance.part(asked, OK, False, ExecutionTimes())
    instance.finish([None])
    asked.pause(True)
    asked.pause(False)
    asked.cancel()
    assert instance.told == [("pause", asked), ("resume", asked), ("cancel", asked)]
    assert of.in_flight == 1, "until the model has said its last"
    instance.part(asked, EMPTY, True, ExecutionTimes())
    asked.pause(True)
    assert of.in_flight == 0
    assert len(instance.told) == 3


def test_answers_in_the_order_of_the_questions(bench: Bench) -> None:
    of = bench.dispatcher(instances=3, max_batch_size=2, preserve_ordering=True)
    asked = bench.ask(of, 1, 1, 2, 1, 1)
    bench.loop.settle()
    bench.instances[2].finish()
    bench.instances[1].finish()
    assert bench.caller.answers == []
    bench.instances[0].finish()
    assert [each for each, _, _ in bench.caller.answers] == asked
    assert of.in_flight == 0


def test_an_instance_that_dies_does_not_hold_up_the_others(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1, preserve_ordering=True)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    bench.instances[1].finish()
    bench.instances[0].die()
    assert [bench.answer(each) for each in (first, second)] == ["Internal: died", "ok"]


def test_traces_are_told_how_requests_ran(bench: Bench) -> None:
    of = bench.dispatcher()
    tracing = Tracing(TraceOptions(levels=("TIMESTAMPS",), rate=1, file="never written"), lambda: None)
    asked = [request(sink=bench.caller) for _ in range(3)]
    traces = []
    for each in asked:
        tracing.begin(each, 1, tracing.settings.sampler(""))
        assert isinstance(each.sink, Trace)
        traces.append(each.sink)
    of.notify_observers()
    added = FakeInstance("model_1")
    of.add(added)
    (first,) = bench.instances
    for each in asked:
        of.submit(each)
        bench.loop.settle()
    first.part(asked[0], OK, False, None)
    first.finish([None])
    first.part(asked[0], EMPTY, True, None)
    added.finish()
    bench.loop.settle()
    first.die()
    ran = [[name for _, name in trace_events(trace)] for trace in traces]
    assert ["COMPUTE_END" in names for names in ran] == [True, True, False]
    assert all("REQUEST_END" in names for names in ran)
    assert [len(bench.caller.of(each)) for each in asked] == [2, 1, 1]
