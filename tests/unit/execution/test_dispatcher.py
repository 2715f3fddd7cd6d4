"""The dispatcher: what it does with time, instances that come and go, and callers that give up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_runner import OK, FakeRunner

from doubles import Caller, FakeLoop, request
from nerite.config.options import QueueOptions, TraceOptions
from nerite.core.child_request import ChildRequest
from nerite.core.errors import Unavailable
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.execution import dispatcher as module
from nerite.execution.any_instance import BRIEF_NS, AnyInstance
from nerite.execution.dispatcher import Dispatcher
from nerite.execution.loop_runner import LoopRunner
from nerite.execution.runner import Batch
from nerite.execution.sentry import Sentry
from nerite.observability.statistics import Outcome, VersionStatistics
from nerite.observability.tracing import Trace, Tracing
from nerite.scheduling.admission import Admission
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.one_by_one import OneByOne
from nerite.scheduling.policy import BatchingRules, QueuePolicy

US = 1000
MS = 1_000_000
UNBOUNDED = QueueOptions(max_requests=0, max_seconds=0)


class Bench:
    """A dispatcher with everything around it."""

    def __init__(self, loop: FakeLoop) -> None:
        self.loop = loop
        self.caller = Caller()
        self.statistics = VersionStatistics()
        self.runners: list[FakeRunner] = []

    def dispatcher(
        self,
        *,
        instances: int = 1,
        ahead: bool = False,
        preserve_ordering: bool = False,
        max_batch_size: int = 8,
        bounds: QueueOptions = UNBOUNDED,
        **rules: Any,
    ) -> Dispatcher:
        self.runners = [FakeRunner(f"model_{number}", ahead=ahead) for number in range(instances)]
        batcher = DynamicBatcher(BatchingRules(max_batch_size, **rules))
        loop: Any = self.loop
        return Dispatcher(
            AnyInstance(batcher),
            self.runners,
            self.statistics,
            loop,
            Sentry(loop, 0.0),
            Admission(bounds, "model"),
            preserve_ordering=preserve_ordering,
        )

    def ask(self, of: Dispatcher, *rows: int, **fields: Any) -> list[InferenceRequest]:
        asked = [request(each, sink=self.caller, **fields) for each in rows or (1,)]
        for each in asked:
            of.submit(each)
        return asked

    def answer(self, asked: InferenceRequest) -> str:
        """``ok``, the text of the error, or nothing yet. At most one answer, or the test fails."""
        answers = self.caller.of(asked)
        assert len(answers) <= 1
        if not answers:
            return "nothing yet"
        error = answers[0].error
        return "ok" if error is None else f"{type(error).__name__}: {error.message}"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    loop = FakeLoop()
    monkeypatch.setattr(module, "_now", loop.now)
    yield Bench(loop)


def test_requests_of_one_turn_run_together(bench: Bench) -> None:
    of = bench.dispatcher()
    asked = bench.ask(of, 1, 2, 1)
    (runner,) = bench.runners
    assert runner.batches == []
    assert (of.pending, of.in_flight) == (3, 3)
    bench.loop.settle()
    assert bench.loop.turns == 1
    assert runner.batches == [asked]
    assert (of.pending, of.in_flight) == (0, 3)
    runner.finish()
    assert [bench.answer(each) for each in asked] == ["ok"] * 3
    assert (of.pending, of.in_flight) == (0, 0)


def test_every_free_instance_gets_a_batch(bench: Bench) -> None:
    of = bench.dispatcher(instances=3, max_batch_size=1)
    asked = bench.ask(of, *[1] * 4)
    bench.loop.settle()
    assert [runner.batch for runner in bench.runners] == [[asked[0]], [asked[1]], [asked[2]]]
    bench.runners[1].finish()
    assert bench.runners[1].batch == [asked[3]]


def test_an_instance_works_on_while_its_answers_are_sent(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (runner,) = bench.runners
    seen: list[Batch | None] = []
    bench.caller = Caller(lambda _: seen.append(runner.batch))
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    runner.finish()
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
    bench.runners[0].finish()
    bench.loop.settle()
    assert bench.runners[0].batch == more


def test_an_instance_that_runs_at_once(bench: Bench) -> None:
    """``LoopRunner`` calls back before ``run`` returns, and callers ask again before that."""

    class Model:
        def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse]:
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
    runner, admission = LoopRunner("model_0", Model()), Admission(UNBOUNDED, "model")
    of = Dispatcher(AnyInstance(OneByOne()), [runner], bench.statistics, loop, Sentry(loop, 0.0), admission)
    of.submit(request(sink=bench.caller))
    bench.loop.settle()
    assert len(bench.caller.answers) == 2001
    assert all(bench.answer(each) == "ok" for each in asked)
    assert (of.in_flight, bench.statistics.success.count) == (0, 2001)


def warm(bench: Bench, of: Dispatcher, took_ns: int) -> None:
    """Have each instance run one request that takes ``took_ns``."""
    for runner in bench.runners:
        bench.ask(of)
        bench.loop.settle()
        runner.finish(took_ns=took_ns)


def test_a_full_batch_goes_ahead_to_an_instance_whose_batches_are_brief(bench: Bench) -> None:
    of = bench.dispatcher(ahead=True, max_batch_size=2)
    warm(bench, of, BRIEF_NS - 1)
    (runner,) = bench.runners
    first, second, third = bench.ask(of, 2, 1, 1), bench.ask(of, 2), bench.ask(of, 1)
    bench.loop.settle()
    assert (runner.batch, runner.next) == (first[:1], first[1:])
    runner.finish()
    assert (runner.batch, runner.next) == (first[1:], second)
    runner.finish()
    assert (runner.batch, runner.next) == (second, None), "a batch that can grow does not go ahead"
    filling = bench.ask(of, 1)
    bench.loop.settle()
    assert runner.next == [*third, *filling], "it goes once it is full, though no instance came free"
    runner.finish()
    runner.finish()
    assert {bench.answer(each) for each in (*first, *second, *third, *filling)} == {"ok"}
    assert of.in_flight == 0


def test_nothing_goes_ahead_where_batches_take_long(bench: Bench) -> None:
    of = bench.dispatcher(ahead=True, max_batch_size=1)
    warm(bench, of, BRIEF_NS)
    bench.ask(of, 1, 1)
    bench.loop.settle()
    (runner,) = bench.runners
    assert (runner.batch is None, runner.next) == (False, None)
    assert of.pending == 1


def test_idle_instances_come_before_those_that_run(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, ahead=True, max_batch_size=1)
    warm(bench, of, 0)
    asked = bench.ask(of, 1, 1, 1, 1, 1)
    bench.loop.settle()
    assert [(runner.batch, runner.next) for runner in bench.runners] == [
        ([asked[0]], [asked[2]]),
        ([asked[1]], [asked[3]]),
    ]
    assert of.pending == 1


def test_what_went_ahead_is_answered_in_order(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, ahead=True, max_batch_size=1, preserve_ordering=True)
    warm(bench, of, 0)
    asked = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    bench.runners[1].finish()
    assert [bench.answer(each) for each in asked] == ["nothing yet"] * 3
    bench.runners[0].finish()
    assert [bench.answer(each) for each in asked] == ["ok", "ok", "nothing yet"]
    bench.runners[0].finish()
    assert bench.answer(asked[2]) == "ok"


def test_responses_that_come_one_by_one(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (runner,) = bench.runners
    (asked,) = bench.ask(of)
    bench.loop.settle()
    runner.part(asked, OK, False, Marks())
    runner.finish([None])
    assert (of.in_flight, of.pending) == (1, 0), "the instance is free, the request is not over"
    told = drained(bench, of)
    (other,) = bench.ask(of)
    bench.loop.settle()
    runner.finish()
    assert bench.answer(other) == "ok"
    runner.part(asked, OK, False, Marks())
    runner.part(asked, EMPTY, True, Marks())
    assert len(bench.caller.of(asked)) == 3
    assert (of.in_flight, len(told)) == (0, 1)


def test_a_last_response_may_come_before_execute_returns(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (runner,) = bench.runners
    (asked,) = bench.ask(of)
    bench.loop.settle()
    runner.part(asked, OK, True, Marks())
    assert of.in_flight == 1, "the instance is at work still"
    runner.finish([None])
    assert of.in_flight == 0
    assert bench.answer(asked) == "ok"


def test_each_request_of_a_batch_counts_once(bench: Bench) -> None:
    """One had its last response while the batch ran, one gets it later, one was answered by what was returned."""
    of = bench.dispatcher(max_batch_size=3)
    (runner,) = bench.runners
    early, late, returned = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    runner.part(early, OK, True, Marks())
    assert bench.statistics.success.count == 1
    runner.part(late, OK, False, Marks())
    runner.finish([None, None, OK])
    assert (bench.statistics.success.count, bench.statistics.execution_count) == (2, 1)
    assert (of.in_flight, bench.answer(returned)) == (1, "ok")
    late.cancel()
    runner.part(late, EMPTY, True, Marks())
    assert (bench.statistics.success.count, bench.statistics.failures[Outcome.CANCELED], of.in_flight) == (2, 1, 0)
    assert list(bench.statistics.batches) == [3]


def test_a_batch_that_dies_fails_what_it_had_not_ended(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    (runner,) = bench.runners
    ended, running = bench.ask(of, 1, 1)
    bench.loop.settle()
    runner.part(ended, OK, True, Marks())
    runner.part(running, OK, False, Marks())
    runner.die()
    assert (bench.statistics.success.count, bench.statistics.failures[Outcome.BACKEND], of.in_flight) == (1, 1, 0)
    assert [final for asked, _, final in bench.caller.answers if asked is running] == [False, True]


def test_a_late_response_keeps_its_place(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, preserve_ordering=True)
    (runner,) = bench.runners
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    runner.finish([None])
    runner.finish()
    assert [bench.answer(each) for each in (first, second)] == ["nothing yet"] * 2
    runner.part(first, OK, True, Marks())
    assert [bench.answer(each) for each in (first, second)] == ["ok", "ok"]


def test_the_model_is_told_of_who_gave_up_and_of_who_has_enough(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    (runner,) = bench.runners
    (asked,) = bench.ask(of)
    bench.loop.settle()
    asked.pause(True)
    runner.part(asked, OK, False, Marks())
    runner.finish([None])
    asked.pause(True)
    asked.pause(False)
    asked.cancel()
    assert runner.told == [("pause", asked), ("resume", asked), ("cancel", asked)]
    assert of.in_flight == 1, "until the model has said its last"
    runner.part(asked, EMPTY, True, Marks())
    asked.pause(True)
    assert of.in_flight == 0
    assert len(runner.told) == 3


def test_a_batch_waits_as_long_as_the_delay_and_no_longer(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=1500)
    asked = bench.ask(of, 1)
    bench.loop.advance(1500 * US - 1)
    assert bench.runners[0].batch is None
    bench.loop.advance(2 * FakeLoop.TURN_NS)
    assert bench.runners[0].batch == asked


def test_the_timer_follows_the_oldest(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, preferred_sizes=(4,))
    bench.ask(of, 1)
    bench.loop.advance(5 * MS)
    bench.ask(of, 1)
    bench.loop.advance(4 * MS)
    assert bench.runners[0].batch is None
    bench.loop.advance(MS + 2 * FakeLoop.TURN_NS)
    assert [each.header.batch_size for each in bench.runners[0].batch or ()] == [1, 1]


def test_a_waiting_batch_that_fills_up_goes_at_once(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, preferred_sizes=(2,))
    asked = bench.ask(of, 1)
    bench.loop.advance(MS)
    asked += bench.ask(of, 1)
    bench.loop.settle()
    assert bench.runners[0].batch == asked
    bench.runners[0].finish()
    turns = bench.loop.turns
    bench.loop.advance(100 * MS)
    assert bench.loop.turns <= turns + 1


def test_a_waiting_batch_that_fits_better_without_one_that_gave_up_goes_at_once(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=8, max_delay_us=10_000, preferred_sizes=(4, 8))
    one, two, other = bench.ask(of, 1, 2, 2)
    bench.loop.settle()
    assert bench.runners[0].batch is None
    one.cancel()
    bench.loop.settle()
    assert bench.runners[0].batch == [two, other]


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
    bench.runners[0].die()
    bench.loop.advance(1000 * MS)
    assert bench.loop.turns < 200
    bench.runners[0].come_back()
    bench.loop.settle()
    assert bench.runners[0].batch == asked


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
    assert bench.answer(asked) == "Unavailable: Request timeout expired"
    assert bench.statistics.failures[Outcome.REJECTED] == 1
    assert of.pending == 0


def test_what_expires_does_not_run_even_if_an_instance_comes_free_first(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1)
    bench.loop.settle()
    (asked,) = bench.ask(of, 1)
    bench.loop.now_ns += 1000 * US
    bench.runners[0].finish()
    assert bench.answer(asked) == "Unavailable: Request timeout expired"
    assert bench.runners[0].batch is None


def test_a_full_queue_refuses(bench: Bench) -> None:
    of = bench.dispatcher(default_policy=QueuePolicy(max_size=1), max_delay_us=1000)
    first, second = bench.ask(of, 1, 1)
    assert bench.answer(first) == "nothing yet"
    assert bench.answer(second) == "Unavailable: [request id: <id_unknown>] Exceeds maximum queue size"
    assert bench.statistics.failures[Outcome.REJECTED] == 1
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
    assert bench.statistics.failures[Outcome.REJECTED] == 1
    bench.runners[0].finish()
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
    assert (of.pending, bench.statistics.failures[Outcome.REJECTED]) == (2, 4)
    bench.runners[0].finish()
    assert bench.runners[0].batch == [first, second]


def test_who_gives_up_while_waiting_is_answered_and_never_runs(bench: Bench) -> None:
    of = bench.dispatcher()
    first, second = bench.ask(of, 1, 1)
    first.cancel()
    assert bench.answer(first) == "Cancelled: "
    assert bench.statistics.failures[Outcome.CANCELED] == 1
    bench.loop.settle()
    assert bench.runners[0].batch == [second]


def test_who_gives_up_while_running_is_answered_once(bench: Bench) -> None:
    of = bench.dispatcher()
    (asked,) = bench.ask(of, 1)
    bench.loop.settle()
    asked.cancel()
    assert bench.answer(asked) == "nothing yet"
    bench.runners[0].finish()
    assert bench.answer(asked) == "ok"
    assert bench.statistics.failures[Outcome.CANCELED] == 0
    assert of.in_flight == 0


def test_an_instance_that_dies_fails_its_batch_and_nothing_else(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    asked = bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    bench.runners[0].die()
    assert [bench.answer(each) for each in asked] == ["Internal: died", "Internal: died", "nothing yet"]
    assert bench.statistics.failures[Outcome.BACKEND] == 2
    bench.loop.advance(1000 * MS)
    bench.runners[0].come_back()
    bench.loop.settle()
    assert bench.runners[0].batch == [asked[2]]


def test_an_idle_instance_that_dies_gets_nothing(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1)
    bench.runners[0].die()
    asked = bench.ask(of, 1, 1)
    bench.loop.settle()
    assert (bench.runners[0].batch, bench.runners[1].batch) == (None, [asked[0]])


def test_nobody_waits_for_instances_that_cannot_be_started(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    for runner in bench.runners:
        runner.die()
    (early,) = bench.ask(of, 1)
    bench.runners[0].fail_to_come_back()
    assert bench.answer(early) == "nothing yet"
    bench.runners[1].fail_to_come_back("another reason")
    told = "Unavailable: no instance of the model can be started: no such file"
    assert bench.answer(early) == told
    (late,) = bench.ask(of, 1)
    assert bench.answer(late) == told
    bench.runners[1].come_back()
    asked = bench.ask(of, 1)
    bench.loop.settle()
    assert bench.runners[1].batch == asked
    assert of.in_flight == 1


def test_requests_wait_for_an_instance_that_works_though_the_others_cannot_be_started(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    bench.ask(of, 1)
    bench.loop.settle()
    bench.runners[1].die()
    bench.runners[1].fail_to_come_back()
    asked = bench.ask(of, 1)
    bench.loop.settle()
    assert bench.answer(asked[0]) == "nothing yet"
    bench.runners[0].finish()
    assert bench.runners[0].batch == asked


def test_drained_at_once_if_there_is_nothing(bench: Bench) -> None:
    of = bench.dispatcher()
    calls: list[int] = []
    of.when_drained(lambda: calls.append(1))
    assert calls == [1]


def drained(bench: Bench, of: Dispatcher) -> list[int]:
    """How many answers had left when the dispatcher said that it was drained."""
    calls: list[int] = []
    of.when_drained(lambda: calls.append(len(bench.caller.answers)))
    assert calls == []
    return calls


def test_drained_when_the_last_answer_has_left(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=2)
    bench.ask(of, 1, 1, 1)
    bench.loop.settle()
    calls = drained(bench, of)
    bench.runners[0].finish()
    assert calls == []
    bench.runners[0].finish()
    assert calls == [3]
    bench.ask(of, 1)
    bench.loop.settle()
    bench.runners[0].finish()
    assert calls == [3]


def test_drained_when_all_that_waited_were_told(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=1000)
    asked = bench.ask(of, 1, 1, 1)
    calls = drained(bench, of)
    of.abandon(Unavailable("stopping"))
    assert [bench.answer(each) for each in asked] == ["Unavailable: stopping"] * 3
    assert bench.statistics.failures[Outcome.OTHER] == 3
    assert calls == [3]


def test_drained_when_all_that_waited_are_over(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1, 1, 1)
    calls = drained(bench, of)
    bench.loop.advance(2 * MS)
    assert calls == [3]


def test_drained_when_the_last_one_gives_up(bench: Bench) -> None:
    of = bench.dispatcher(max_delay_us=10_000)
    (asked,) = bench.ask(of, 1)
    calls = drained(bench, of)
    asked.cancel()
    assert calls == [1]


def test_drained_after_the_answers_of_a_batch_behind_which_the_rest_expired(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1, default_policy=QueuePolicy(timeout_us=1000))
    bench.ask(of, 1, 1)
    bench.loop.settle()
    calls = drained(bench, of)
    bench.loop.now_ns += 1000 * US
    bench.runners[0].finish()
    assert calls == [2]


def test_what_runs_runs_on_when_the_rest_is_abandoned(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    of.abandon(Unavailable("stopping"))
    assert bench.answer(second) == "Unavailable: stopping"
    bench.runners[0].finish()
    assert bench.answer(first) == "ok"


def test_answers_in_the_order_of_the_questions(bench: Bench) -> None:
    of = bench.dispatcher(instances=3, max_batch_size=2, preserve_ordering=True)
    asked = bench.ask(of, 1, 1, 2, 1, 1)
    bench.loop.settle()
    bench.runners[2].finish()
    bench.runners[1].finish()
    assert bench.caller.answers == []
    bench.runners[0].finish()
    assert [each for each, _, _ in bench.caller.answers] == asked
    assert of.in_flight == 0


def test_an_instance_that_dies_does_not_hold_up_the_others(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1, preserve_ordering=True)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    bench.runners[1].finish()
    bench.runners[0].die()
    assert [bench.answer(each) for each in (first, second)] == ["Internal: died", "ok"]


def test_drained_only_when_the_answers_that_were_held_back_have_left(bench: Bench) -> None:
    of = bench.dispatcher(instances=2, max_batch_size=1, preserve_ordering=True)
    bench.ask(of, 1, 1)
    bench.loop.settle()
    calls = drained(bench, of)
    bench.runners[1].finish()
    assert calls == []
    bench.runners[0].finish()
    assert calls == [2]


def test_one_more_instance_takes_what_waits(bench: Bench) -> None:
    of = bench.dispatcher(max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    more = FakeRunner("model_1")
    of.add(more)
    assert (bench.runners[0].batch, more.batch) == ([first], [second])


def test_an_idle_instance_leaves_at_once(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    left: list[object] = []
    of.remove(bench.runners[0], left.append)
    assert left == [bench.runners[0]]
    (asked,) = bench.ask(of)
    bench.loop.settle()
    assert [runner.batch for runner in bench.runners] == [None, [asked]]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_instance_that_runs_leaves_when_it_has_finished(bench: Bench, ahead: bool) -> None:
    of = bench.dispatcher(instances=2, ahead=ahead, max_batch_size=1)
    first, second = bench.ask(of, 1, 1)
    bench.loop.settle()
    leaving, staying = bench.runners
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
    leaving = bench.runners[0]
    leaving.finish([None])
    left: list[object] = []
    of.remove(leaving, left.append)
    assert left == []
    asked.cancel()
    assert leaving.told == [("cancel", asked)]
    leaving.part(asked, EMPTY, True, Marks())
    bench.loop.settle()
    assert left == [leaving]


def test_an_instance_that_dies_on_its_way_out(bench: Bench) -> None:
    of = bench.dispatcher(instances=2)
    (asked,) = bench.ask(of)
    bench.loop.settle()
    leaving, staying = bench.runners
    left: list[object] = []
    of.remove(leaving, left.append)
    leaving.die()
    bench.loop.settle()
    assert left == [leaving]
    assert bench.answer(asked) == "Internal: died"
    (another,) = bench.ask(of)
    bench.loop.settle()
    assert staying.batch == [another]


def test_traces_are_told_how_requests_ran(bench: Bench) -> None:
    of = bench.dispatcher()
    tracing = Tracing(TraceOptions(levels=("TIMESTAMPS",), rate=1, file="never written"), lambda: None)
    asked = [request(sink=bench.caller) for _ in range(3)]
    traces = []
    for each in asked:
        tracing.begin(each, 1)
        assert isinstance(each.sink, Trace)
        traces.append(each.sink)
    of.tell_witnesses()
    added = FakeRunner("model_1")
    of.add(added)
    (first,) = bench.runners
    for each in asked:
        of.submit(each)
        bench.loop.settle()
    first.part(asked[0], OK, False, None)
    first.finish([None])
    first.part(asked[0], EMPTY, True, None)
    added.finish()
    bench.loop.settle()
    first.die()
    ran = [[record["timestamps"][0]["name"] for record in trace.records()[1:]] for trace in traces]
    assert ["COMPUTE_END" in names for names in ran] == [True, True, False]
    assert all("REQUEST_END" in names for names in ran)
    assert [len(bench.caller.of(each)) for each in asked] == [2, 1, 1]
