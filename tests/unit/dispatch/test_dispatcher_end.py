"""The end of a dispatcher: when it is drained, and what becomes of those that wait."""

from __future__ import annotations

from dispatcher_bench import MS, US, Bench
from nerite.core.errors import Unavailable
from nerite.observability.statistics import RequestOutcome
from nerite.scheduling.decider import QueuePolicy


def test_drained_at_once_if_there_is_nothing(bench: Bench) -> None:
    of = bench.dispatcher()
    calls: list[int] = []
    of.when_drained(lambda: calls.append(1))
    assert calls == [1]


def test_drained_when_the_last_answer_has_left(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    calls = bench.drained(of)
    bench.instances[0].finish()
    assert calls == []
    bench.instances[0].finish()
    assert calls == [3]
    bench.ask(of, 1)
    bench.loop.settle()
    bench.instances[0].finish()
    assert calls == [3]


def test_drained_when_all_that_waited_were_told(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=1000)
    asked = bench.ask(of, 1, 1, 1)
    calls = bench.drained(of)
    of.abandon(Unavailable("stopping"))
    assert [bench.answer(each) for each in asked] == ["Unavailable: stopping"] * 3
    assert bench.statistics.failures[RequestOutcome.OTHER] == 3
    assert calls == [3]


def test_drained_when_all_that_waited_are_over(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1, 1, 1)
    calls = bench.drained(of)
    bench.loop.advance(2 * MS)
    assert calls == [3]


def test_drained_when_the_last_one_gives_up(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000)
    (asked,) = bench.ask(of, 1)
    calls = bench.drained(of)
    asked.cancel()
    assert calls == [1]


def test_drained_after_the_answers_of_a_batch_behind_which_the_rest_expired(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1, 1)
    bench.loop.settle()
    calls = bench.drained(of)
    bench.loop.now_ns += 1000 * US
    bench.instances[0].finish()
    assert calls == [2]


def test_what_runs_runs_on_when_the_rest_is_abandoned(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    of.abandon(Unavailable("stopping"))
    assert bench.answer(second) == "Unavailable: stopping"
    bench.instances[0].finish()
    assert bench.answer(first) == "ok"


def test_drained_only_when_the_answers_that_were_held_back_have_left(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1, preserve_ordering=True)
    bench.ask(of, 1, 1)
    bench.loop.settle()
    calls = bench.drained(of)
    bench.instances[1].finish()
    assert calls == []
    bench.instances[0].finish()
    assert calls == [2]
