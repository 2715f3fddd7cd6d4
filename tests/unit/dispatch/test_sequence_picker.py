"""Sequences between callers and instances: what is counted, what leaves with an instance, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import Caller, FakeLoop, request
from fake_instance import OK, FakeInstance
from nerite.config.model_config import ModelConfig, ModelSequenceBatching, ModelTransactionPolicy
from nerite.config.options import QueueOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, Reschedule, ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.dispatch import dispatcher, sequence_picker
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.dispatch.sequence_picker import SequencePicker
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.decider import BatchingRules
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.sequence import SequenceRequest, SequenceRules

MS = 1_000_000
CORRID = ModelSequenceBatching.Control(kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_UINT64")


class Shedder(LoadShedder):
    """Admits every request, and keeps how many it was told that had been executed."""

    executed = -1

    def grant(self, waiting: int, executed: int, now: int) -> int:
        self.executed = executed
        return super().grant(waiting, executed, now)


class Bench:
    """A dispatcher with a roster of sequences, and everything around it."""

    def __init__(self, loop: FakeLoop) -> None:
        self.loop: Any = loop
        self.caller = Caller()
        self.statistics = VersionStatistics()
        self.instances: list[FakeInstance] = []
        self.of: Dispatcher
        self.admission: Shedder

    def start(
        self,
        instances: int = 1,
        slots: int = 2,
        *,
        preserve_ordering: bool = False,
        delay_us: int = 0,
        share_of: Callable[[str], float] | None = None,
        **batching: Any,
    ) -> Dispatcher:
        """Sequences may be idle for 10 ms. The model is told of a correlation id that is a number.

        The strategy is Oldest where an order is preserved: Direct knows none.
        """
        controls = (ModelSequenceBatching.ControlInput(name="CORRID", control=(CORRID,)),)
        config = ModelConfig(
            name="model",
            max_batch_size=slots,
            sequence_batching=ModelSequenceBatching(control_input=controls, **batching),
            model_transaction_policy=ModelTransactionPolicy(decoupled=True),
        )
        rules = SequenceRules(
            "model",
            slots,
            10_000,
            batching=BatchingRules(slots) if preserve_ordering else None,
            max_delay_us=delay_us,
            min_utilization=1.0 if delay_us else 0.0,
            share_of=share_of,
        )
        picker = SequencePicker(config, SequenceInputs(config, Path()), rules)
        self.instances = [FakeInstance(f"model_{number}") for number in range(instances)]
        self.admission = Shedder(QueueOptions(), "model")
        self.of = Dispatcher(
            picker,
            self.instances,
            self.statistics,
            self.loop,
            BusyPoll(self.loop, 0.0),
            self.admission,
            preserve_ordering=preserve_ordering,
        )
        return self.of

    def ask(self, sequence_id: int | str, *, start: bool = False, end: bool = False, rows: int = 1) -> InferenceRequest:
        outer = request(rows, sink=self.caller, sequence_id=sequence_id, sequence_start=start, sequence_end=end)
        self.of.submit(SequenceRequest(outer))
        self.loop.settle()
        return outer

    def answer(self, asked: InferenceRequest) -> str:
        answers = self.caller.of(asked)
        assert len(answers) <= 1
        if not answers:
            return "nothing yet"
        error = answers[0].error
        return "ok" if error is None else error.message

    def running(self, number: int = 0) -> list[InferenceRequest | None]:
        """What an instance runs, by the callers' requests; None for a slot without one."""
        batch = self.instances[number].batch or []
        return [each.outer if isinstance(each, SequenceRequest) else None for each in batch]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    loop = FakeLoop()
    loop.rule(monkeypatch, dispatcher, sequence_picker)
    yield Bench(loop)


def test_slots_without_a_request_are_rows_and_nothing_else(bench: Bench) -> None:
    bench.start()
    bench.ask(1, start=True)
    second = bench.ask(2, start=True)
    bench.instances[0].finish()
    bench.instances[0].finish()
    third = bench.ask(2, end=True)
    assert bench.running() == [None, third]
    bench.instances[0].finish()
    assert [bench.answer(each) for each in (second, third)] == ["ok", "ok"]
    assert bench.of.in_flight == 0
    statistics = bench.statistics
    assert (statistics.inference_count, statistics.execution_count, statistics.success.count) == (3, 3, 3)
    assert {size: counts.compute_infer.count for size, counts in statistics.batches.items()} == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sequence_id": 1}, "must specify the START flag on the first request"),
        ({"sequence_id": 0, "start": True}, "must specify a non-zero or non-empty correlation ID"),
        (
            {"sequence_id": "", "start": True},
            "control 'CORRID' data-type is 'BYTES', but model 'model' expects 'UINT64'",
        ),
        ({"sequence_id": "a", "start": True}, "] sequence batching control 'CORRID' data-type is 'BYTES', but model"),
        ({"sequence_id": 1, "start": True, "rows": 2}, "must specify batch-size 1 due to requirements of sequence"),
    ],
)
def test_a_mistake_of_the_caller_counts_nowhere(bench: Bench, asked: dict[str, Any], words: str) -> None:
    bench.start()
    assert words in bench.answer(bench.ask(**asked))
    assert bench.statistics.fail.count == 0
    assert bench.of.in_flight == 0


def test_what_the_caller_does_reaches_the_model(bench: Bench) -> None:
    bench.start()
    asked = bench.ask(1, start=True)
    inner = bench.instances[0].batches[0][0]
    bench.instances[0].part(inner, OK, False, ExecutionTimes())
    asked.pause(True)
    asked.pause(False)
    asked.cancel()
    assert bench.instances[0].told == [("pause", inner), ("resume", inner), ("cancel", inner)]


def test_who_cancels_answers_for_the_rest_of_the_sequence(bench: Bench) -> None:
    bench.start()
    first, second, third = bench.ask(1, start=True), bench.ask(1), bench.ask(1)
    third.cancel()
    assert [bench.answer(each) for each in (first, second, third)] == ["nothing yet", "", ""]
    bench.instances[0].finish()
    assert bench.answer(first) == "ok"
    assert bench.statistics.failures[RequestOutcome.CANCELED] == 2


def test_what_dies_with_an_instance(bench: Bench) -> None:
    bench.start(instances=2, slots=1)
    running, other = bench.ask(1, start=True), bench.ask(2, start=True)
    waiting, elsewhere = bench.ask(1), bench.ask(3, start=True)
    bench.instances[0].die()
    assert bench.answer(running) == "died"
    assert "(sequence 1 ended: the instance that had it, 'model_0', died)" in bench.answer(waiting)
    bench.instances[0].come_back()
    assert (bench.running(0), bench.running(1)) == ([elsewhere], [other])
    assert bench.of.in_flight == 2


def test_nobody_waits_for_ever(bench: Bench) -> None:
    bench.start(slots=1)
    bench.instances[0].die()
    asked = [bench.ask(number, start=True) for number in (1, 2, 3)]
    asked.append(bench.ask(3))
    bench.instances[0].fail_to_come_back()
    assert {bench.answer(each) for each in asked} == {"no instance of the model can be started: no such file"}
    assert bench.of.in_flight == 0


@pytest.mark.parametrize("how", ["ends", "is idle", "dies", "is cancelled"])
def test_an_instance_leaves_when_its_last_sequence_is_over(bench: Bench, how: str) -> None:
    of = bench.start(instances=2)
    left: list[str] = []
    bench.ask(1, start=True)
    first = bench.instances[0]
    first.finish()
    of.remove(first, lambda instance: left.append(instance.name))
    bench.loop.settle()
    new = bench.ask(2, start=True)
    assert bench.running(1) == [new]
    assert left == []
    if how == "ends":
        bench.ask(1, end=True)
        first.finish()
    elif how == "is idle":
        bench.loop.advance(11 * MS)
    elif how == "dies":
        first.die()
    else:
        running, waiting = bench.ask(1), bench.ask(1)
        waiting.cancel()
        bench.loop.settle()
        assert (left, bench.answer(running)) == ([], "nothing yet")
        first.finish()
    bench.loop.settle()
    assert left == ["model_0"]


def test_an_idle_sequence_is_over_when_its_time_is(bench: Bench) -> None:
    bench.start(slots=1)
    bench.ask(1, start=True)
    bench.loop.pass_time(50 * MS)
    bench.instances[0].finish()
    waiting = bench.ask(2, start=True)
    bench.loop.advance(10 * MS - 1)
    assert bench.running() == []
    bench.loop.advance(2 * FakeLoop.TURN_NS)
    assert bench.running() == [waiting]


AGAIN = Reschedule(None)
STATE = ModelSequenceBatching.State(input_name="BEFORE", output_name="AFTER", data_type="TYPE_FP32", dims=(1,))


def left(value: float) -> InferenceResponse:
    """What a model sends to leave a state."""
    header = ResponseHeader("model", "1", [TensorSpec("AFTER", dtypes.FP32, (1, 1))])
    return InferenceResponse(header, [np.array([[value]], np.float32).tobytes()])


@pytest.mark.parametrize("how", ["is cancelled", "dies", "is abandoned"])
def test_who_is_refused_between_two_turns_keeps_no_place_in_the_order(bench: Bench, how: str) -> None:
    of = bench.start(slots=2, iterative_sequence=True, preserve_ordering=True)
    asked = bench.ask(0)
    instance = bench.instances[0]
    instance.part(instance.batches[0][0], OK, False, ExecutionTimes())
    asked.pause(True)
    instance.finish([AGAIN])
    other = bench.ask(0)
    assert bench.running() == [other]
    if how == "is cancelled":
        asked.cancel()
    elif how == "dies":
        instance.die()
        instance.come_back()
    else:
        of.abandon(Unavailable("stopping"))
    if how != "dies":
        instance.finish()
    last = bench.ask(0)
    instance.finish()
    assert len(bench.caller.of(asked)) == 2
    assert bench.answer(other) == ("died" if how == "dies" else "ok")
    assert bench.answer(last) == "ok"
    assert of.in_flight == 0
    assert of.settled
    counts = bench.statistics
    assert counts.success.count + counts.fail.count == 3


def test_a_state_that_comes_when_the_sequence_is_over(bench: Bench) -> None:
    bench.start(state=(STATE,))
    asked = bench.ask(1, start=True, end=True)
    instance = bench.instances[0]
    inner = instance.batches[0][0]
    instance.finish([None])
    instance.part(inner, left(1.0), False, ExecutionTimes())
    instance.part(inner, EMPTY, True, ExecutionTimes())
    assert bench.caller.of(asked) == [EMPTY]
    assert bench.of.in_flight == 0


def test_what_an_idle_instance_had_runs_elsewhere_at_once(bench: Bench) -> None:
    bench.start(instances=2, slots=2, delay_us=5_000)
    first, second = (bench.ask(number, start=True) for number in (1, 2))
    assert (bench.running(0), bench.running(1)) == ([], [])
    bench.instances[0].die()
    bench.loop.settle()
    assert bench.running(1) == [second, first]


def test_a_model_that_goes_keeps_no_place_for_who_cannot_come_back(bench: Bench) -> None:
    of = bench.start(slots=1)
    bench.ask(1, start=True)
    bench.instances[0].finish()
    waiting = [bench.ask(number, start=True) for number in (2, 3)]
    drained: list[bool] = []
    of.when_drained(lambda: drained.append(True))
    for asked in waiting:
        bench.loop.settle()
        assert bench.running() == [asked]
        bench.instances[0].finish()
    assert drained == [True]
    bench.loop.settle()
    assert bench.loop.next_timer is None


def test_the_last_answer_due_is_that_of_an_idle_instance(bench: Bench) -> None:
    of = bench.start(instances=1, slots=2, iterative_sequence=True)
    asked = bench.ask(0)
    instance = bench.instances[0]
    instance.part(instance.batches[0][0], OK, False, ExecutionTimes())
    asked.pause(True)
    instance.finish([AGAIN])
    drained: list[bool] = []
    of.when_drained(lambda: drained.append(True))
    instance.die()
    assert drained == [True]


class Watcher(Caller, ExecutionObserver):
    """A caller that wants to know how its requests run."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        self.told.append("ran")

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        self.told.append("turned")


def test_a_observer_hears_of_each_turn_and_which_is_the_last(bench: Bench) -> None:
    of = bench.start(slots=2, iterative_sequence=True)
    of.notify_observers()
    bench.caller = watcher = Watcher()
    asked, other = bench.ask(0), bench.ask(0)
    bench.instances[0].finish([AGAIN])
    bench.instances[0].finish([OK, AGAIN])
    assert watcher.told == ["turned", "ran", "turned"]
    bench.instances[0].finish()
    assert watcher.told[3:] == ["ran"]
    assert [bench.answer(each) for each in (asked, other)] == ["ok", "ok"]


@pytest.mark.parametrize("when", ["during a turn", "between two turns"])
def test_who_is_cancelled_gets_no_other_turn(bench: Bench, when: str) -> None:
    of = bench.start(slots=2, iterative_sequence=True)
    asked, other = bench.ask(0), bench.ask(0)
    instance = bench.instances[0]
    instance.finish([AGAIN])
    assert bench.running() == [asked, other]
    if when == "during a turn":
        asked.cancel()
    instance.finish([AGAIN, AGAIN])
    if when == "between two turns":
        instance.finish([AGAIN, AGAIN])
        asked.cancel()
        instance.finish([AGAIN, AGAIN])
    bench.loop.settle()
    assert bench.running() == [None, other]
    instance.finish()
    assert (bench.answer(asked), bench.answer(other), of.in_flight) == ("", "ok", 0)
    assert (bench.statistics.success.count, bench.statistics.failures[RequestOutcome.CANCELED]) == (1, 1)


def test_each_turn_finds_the_inputs_as_they_were(bench: Bench) -> None:
    bench.start(slots=1, iterative_sequence=True)
    asked = bench.ask(0)
    for _ in range(2):
        (inner,) = bench.instances[0].batches[-1]
        assert memoryview(inner.data[0]).readonly
        assert inner.data[0] == asked.data[0]
        bench.instances[0].finish([AGAIN])


def test_a_turn_that_is_not_the_last_takes_nothing_out_of_the_queue(bench: Bench) -> None:
    bench.start(slots=1, iterative_sequence=True)
    bench.ask(0)
    for _ in range(10):
        bench.instances[0].finish([AGAIN])
        bench.loop.settle()
    bench.ask(0)
    assert bench.admission.executed == 0


def test_ids_that_are_assigned_cannot_be_guessed_where_there_are_tenants(bench: Bench) -> None:
    """A model that keeps what it has of a request by its id would mix it with another tenant's."""
    bench.start(slots=2, iterative_sequence=True, share_of=lambda _: 1.0)
    bench.ask(0)
    batch = bench.instances[0].batch
    assert batch is not None
    assert isinstance(assigned := batch[0].header.sequence_id, int)
    assert assigned > 2**32
