"""Requests that a version cannot answer, and that another may: who is told of them, and when."""

from __future__ import annotations

import pytest

from dispatcher_bench import MS, Bench
from doubles import FakeLoop
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader

DOWN = Unavailable("no instance is up")
PART = InferenceResponse(ResponseHeader("model", "1", ()))


@pytest.fixture
def bench() -> Bench:
    return Bench(FakeLoop())


def test_waiting_requests_that_can_run_elsewhere_are_handed_back(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (runs,) = bench.ask(of, 1)
    bench.loop.settle()
    stays, leaves, also = bench.ask(of, 1, 1, 1)
    of.hand_back(lambda request: request is not stays, DOWN)
    assert [bench.answer(each) for each in (runs, stays)] == ["nothing yet"] * 2
    assert [bench.answer(each) for each in (leaves, also)] == ["Unavailable: no instance is up"] * 2
    assert (of.pending, of.in_flight) == (1, 2)
    bench.instances[0].finish()
    assert bench.instances[0].batch == [stays]


def test_a_request_that_stays_has_waited_since_it_came(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    bench.ask(of, 1)
    bench.loop.settle()
    (stays,) = bench.ask(of, 1)
    queued = stays.queued_ns
    bench.loop.advance(5 * MS)
    of.hand_back(lambda _: False, DOWN)
    assert stays.queued_ns == queued


def test_what_a_dead_instance_had_is_lost_unless_it_is_being_answered(bench: Bench) -> None:
    of = bench.dispatcher()
    lost: list[InferenceRequest] = []
    of.on_lost = lost.append
    silent, answering = bench.ask(of, 1, 1)
    bench.loop.settle()
    (instance,) = bench.instances
    times = ExecutionTimes()
    times.end()
    instance.part(answering, PART, False, times)
    instance.die()
    assert lost == [silent]


def test_what_waits_is_lost_when_no_instance_comes_back(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    lost: list[InferenceRequest] = []
    of.on_lost = lost.append
    bench.instances[0].die()
    asked = bench.ask(of, 1, 1)
    assert lost == []
    bench.instances[0].fail_to_come_back()
    assert lost == asked
    assert bench.answer(asked[0]).startswith("Unavailable: no instance of the model can be started")
