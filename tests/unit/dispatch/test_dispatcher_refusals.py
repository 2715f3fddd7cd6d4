"""What the dispatcher refuses, and callers that give up."""

from __future__ import annotations

import pytest

from dispatcher_bench import US, Bench
from doubles import FakeLoop, request
from nerite.config.options import QueueOptions
from nerite.core.errors import Unavailable
from nerite.core.model_calls import ChildRequest
from nerite.observability.statistics import RequestOutcome
from nerite.scheduling.decider import QueuePolicy


@pytest.mark.parametrize("busy", [False, True])
def test_a_request_expires_exactly_whether_an_instance_is_free_or_not(bench: Bench, busy: bool) -> None:
    of = bench.dispatcher(max_batch_size=1, hold_until=0 if busy else 2, default_policy=QueuePolicy(timeout_us=2300))
    if busy:
        bench.ask(of, 1)
        bench.loop.settle()
    (asked,) = bench.ask(of, 1)
    bench.loop.advance(2300 * US - 1)
    assert bench.answer(asked) == "nothing yet"
    bench.loop.advance(2 * FakeLoop.TURN_NS)
    assert bench.answer(asked) == "QueueTimeout: Request timeout expired"
    assert bench.statistics.failures[RequestOutcome.TIMED_OUT] == 1
    assert of.pending == 0


def test_what_expires_does_not_run_even_if_an_instance_comes_free_first(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1)
    bench.loop.settle()
    (asked,) = bench.ask(of, 1)
    bench.loop.now_ns += 1000 * US
    bench.instances[0].finish()
    assert bench.answer(asked) == "QueueTimeout: Request timeout expired"
    assert bench.instances[0].batch is None


def test_a_full_queue_refuses(bench: Bench) -> None:
    of = bench.dispatcher(default_policy=QueuePolicy(max_size=1), max_delay_us=1000)
    first, second = bench.ask(of, 1, 1)
    assert bench.answer(first) == "nothing yet"
    assert bench.answer(second) == "QueueFull: [request id: <id_unknown>] Exceeds maximum queue size"
    assert bench.statistics.failures[RequestOutcome.REJECTED] == 1
    assert bench.statistics.fail.count == 1
    assert of.in_flight == 1


def test_a_queue_that_is_too_long_refuses(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, bounds=QueueOptions(max_requests=2, max_seconds=0))
    bench.ask(of, 1)
    bench.loop.settle()
    *waiting, refused = bench.ask(of, 1, 1, 1, id="seven")
    assert [bench.answer(each) for each in waiting] == ["nothing yet"] * 2
    error = bench.caller.of(refused)[0].error
    assert isinstance(error, Unavailable)
    assert error.message.startswith(
        "[request id: seven] Exceeds maximum queue size: 2 requests wait for model 'model'. "
    )
    assert error.retry_after == 1
    assert bench.statistics.failures[RequestOutcome.REJECTED] == 1
    bench.instances[0].finish()
    (taken,) = bench.ask(of, 1)
    assert (bench.answer(taken), of.pending) == ("nothing yet", 2)


def test_what_another_request_needs_to_go_on_is_let_in(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, bounds=QueueOptions(max_requests=1, max_seconds=0))
    bench.ask(of)
    parent = request(sink=bench.caller)
    step = ChildRequest(parent, parent.header, parent.data, bench.caller, 0)
    of.submit(step)
    assert bench.caller.of(step) == []
    assert of.pending == 2


def test_who_matters_less_is_refused_instead(bench: Bench) -> None:
    bounds = QueueOptions(max_requests=2, max_seconds=0)
    of = bench.dispatcher(max_batch_size=4, levels=2, default_level=2, bounds=bounds)
    bench.ask(of, 4)
    bench.loop.settle()
    older, younger, refused = bench.ask(of, 1, 1, 1)
    assert bench.answer(refused) != "nothing yet"
    (first,) = bench.ask(of, 1, priority=1)
    assert "Exceeds maximum queue size" in bench.answer(younger)
    (second,) = bench.ask(of, 1, priority=1)
    assert "Exceeds maximum queue size" in bench.answer(older)
    (third,) = bench.ask(of, 1, priority=1)
    assert "Exceeds maximum queue size" in bench.answer(third)
    assert (of.pending, bench.statistics.failures[RequestOutcome.REJECTED]) == (2, 4)
    bench.instances[0].finish()
    assert bench.instances[0].batch == [first, second]


def test_who_gives_up_while_waiting_is_answered_and_never_runs(bench: Bench) -> None:
    of = bench.dispatcher()
    first, second = bench.ask(of, 1, 1)
    first.cancel()
    assert bench.answer(first) == "Cancelled: "
    assert bench.statistics.failures[RequestOutcome.CANCELED] == 1
    bench.loop.settle()
    assert bench.instances[0].batch == [second]


def test_who_gives_up_while_running_is_answered_once(bench: Bench) -> None:
    of = bench.dispatcher()
    (asked,) = bench.ask(of, 1)
    bench.loop.settle()
    asked.cancel()
    assert bench.answer(asked) == "nothing yet"
    bench.instances[0].finish()
    assert bench.answer(asked) == "ok"
    assert bench.statistics.failures[RequestOutcome.CANCELED] == 0
    assert of.in_flight == 0
