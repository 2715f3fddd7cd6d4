"""From ``submit`` to the answer, for any mix of callers, batches, failures and times.

Every caller gets exactly its own rows, or exactly one error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import Caller, FakeLoop, request
from fake_instance import FakeInstance
from nerite.config.options import QueueOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Cancelled, Internal, InvalidArgument, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.dispatch import dispatcher as module
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.instances.instance import run_model
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.decider import BatchingRules, QueuePolicy
from nerite.scheduling.dynamic_batcher import DefaultScheduler, DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder

US = 1000
MS = 1_000_000


class Identity:
    """A model that joins its batch, gives it back row by row, and fails as it is told."""

    def __init__(self, mood: str) -> None:
        self._mood = mood

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        joined = np.concatenate([np.frombuffer(each.data[0], np.float32) for each in requests])
        answers = []
        at = 0
        for number, each in enumerate(requests):
            rows = each.header.batch_size
            data = joined[at : at + rows].tobytes()
            at += rows
            if self._mood == "some fail" and number % 2:
                answers.append(InferenceResponse.failed(InvalidArgument(f"not {data.hex()}")))
            else:
                header = ResponseHeader("model", "1", [TensorSpec("OUT", dtypes.FP32, (rows, 1))])
                answers.append(InferenceResponse(header, [data]))
        if self._mood == "raises":
            raise InvalidArgument("the batch as a whole")
        if self._mood == "crashes":
            raise ValueError("a mistake")
        if self._mood == "too few":
            return answers[1:]
        if self._mood == "too many":
            return [*answers, answers[0]]
        return answers

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


@contextmanager
def time_of(loop: FakeLoop) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        loop.rule(patch, module)
        yield


MOODS = ("well", "well", "well", "some fail", "raises", "crashes", "too few", "too many")
POLICIES = st.builds(
    QueuePolicy,
    timeout_us=st.sampled_from((0, 0, 700, 3000)),
    allow_override=st.booleans(),
    delay_on_timeout=st.booleans(),
    max_size=st.sampled_from((0, 0, 2)),
)


@st.composite
def rules(draw: st.DrawFn) -> BatchingRules | None:
    """Of a batcher; None for a model without one."""
    if draw(st.integers(0, 9)) == 0:
        return None
    limit = draw(st.integers(1, 6))
    levels = draw(st.sampled_from((0, 0, 2)))
    return BatchingRules(
        limit,
        preferred_sizes=tuple(draw(st.lists(st.integers(1, limit), max_size=2, unique=True))),
        max_delay_us=draw(st.sampled_from((0, 500, 2500))),
        levels=levels,
        default_level=levels,
        default_policy=draw(POLICIES),
        policies={1: draw(POLICIES)} if levels else {},
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.fixed_dictionaries(
                {
                    "rows": st.integers(1, 3),
                    "priority": st.integers(0, 3),
                    "timeout_us": st.sampled_from((0, 0, 300, 9000)),
                    "key": st.sampled_from((None, None, "other")),
                }
            ),
        ),
        st.tuples(st.just("turn"), st.none()),
        st.tuples(st.just("pass"), st.integers(0, 4000)),
        st.tuples(st.just("finish"), st.tuples(st.integers(0, 2), st.sampled_from(MOODS))),
        st.tuples(st.just("finish"), st.tuples(st.integers(0, 2), st.sampled_from(MOODS))),
        st.tuples(st.just("cancel"), st.integers(0, 60)),
        st.tuples(st.just("die"), st.integers(0, 2)),
        st.tuples(st.just("come back"), st.integers(0, 2)),
        st.tuples(st.just("fail to come back"), st.integers(0, 2)),
    ),
    min_size=5,
    max_size=60,
)


def finish(instance: FakeInstance, mood: str) -> None:
    """Answer as an instance would: through the guard."""
    if instance.batch is not None:
        batch, instance.batch = instance.batch, None
        timings = ExecutionTimes()
        answers = run_model(Identity(mood), instance.name, batch, timings)
        instance.done(instance, batch, answers, timings)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Models crash on purpose here; their tracebacks are nobody's business."""
    caplog.set_level("CRITICAL", "nerite.execution")


@settings(max_examples=300)
@given(rules(), st.integers(1, 3), st.booleans(), st.sampled_from((0, 0, 4)), OPERATIONS)
def test_everyone_gets_their_own_rows_or_one_error(
    rules: BatchingRules | None, count: int, ordered: bool, most: int, operations: list[tuple[str, Any]]
) -> None:
    loop = FakeLoop()
    answered_at: dict[InferenceRequest, int] = {}
    caller = Caller(lambda each: answered_at.setdefault(each, loop.now_ns) and None)
    instances = [FakeInstance(f"model_{number}") for number in range(count)]
    statistics = VersionStatistics()
    asked: list[InferenceRequest] = []
    asked_at: dict[InferenceRequest, int] = {}
    with time_of(loop):
        of = Dispatcher(
            AnyInstancePicker(DefaultScheduler() if rules is None else DynamicBatcher(rules)),
            instances,
            statistics,
            loop,  # type: ignore[arg-type]
            BusyPoll(loop, 0.0),  # type: ignore[arg-type]
            LoadShedder(QueueOptions(most, max_seconds=0), "model"),
            preserve_ordering=ordered,
        )
        for operation, argument in operations:
            instance = instances[argument % count] if isinstance(argument, int) else instances[0]
            if operation == "ask":
                each = request(sink=caller, value=len(asked) + 1, **argument)
                asked.append(each)
                asked_at[each] = loop.now_ns
                of.submit(each)
            elif operation == "turn":
                loop.settle()
            elif operation == "pass":
                loop.advance(argument * US)
            elif operation == "finish":
                finish(instances[argument[0] % count], argument[1])
            elif operation == "cancel" and asked:
                asked[argument % len(asked)].cancel()
            elif operation == "die" and instance.usable:
                instance.die()
            elif operation == "come back" and not instance.usable:
                instance.come_back()
            elif operation == "fail to come back" and not instance.usable:
                instance.fail_to_come_back()
            running = sum(len(each.batch) for each in instances if each.batch is not None)
            assert of.in_flight == of.pending + running
            assert len(caller.answers) == len(asked) - of.in_flight or ordered
        drained: list[int] = []
        of.when_drained(lambda: drained.append(len(caller.answers)))
        for instance in instances:
            if not instance.usable:
                instance.come_back()
        for _ in range(len(asked) + 1):
            loop.advance(10 * MS)
            for instance in instances:
                finish(instance, "well")
    assert (of.pending, of.in_flight) == (0, 0)
    assert drained == [len(asked)]
    assert len(caller.answers) == len(asked)
    assert set(answered_at) == set(asked)
    for each, response, final in caller.answers:
        assert final
        check_answer(rules, each, response, asked_at[each], answered_at[each])
    ran = [each for instance in instances for batch in instance.batches for each in batch]
    assert len(ran) == len(set(ran))
    check_statistics(statistics, ran, caller)
    if ordered:
        check_order(instances, caller)


def check_answer(
    rules: BatchingRules | None, asked: InferenceRequest, response: InferenceResponse, since: int, until: int
) -> None:
    own = bytes(asked.data[0])
    error = response.error
    if error is None:
        assert [bytes(data) for data in response.data] == [own]
        return
    text = error.message
    if isinstance(error, Cancelled):
        assert asked.cancelled
    elif text == "Request timeout expired":
        assert rules is not None
        policy = rules.policy_of(rules.level_of(asked.header.priority))
        assert not policy.delay_on_timeout
        deadline = since + policy.timeout_for(asked.header.timeout_us) * US
        # Exact, but for the turns of the loop.
        assert deadline <= until <= deadline + 3 * FakeLoop.TURN_NS
    elif text.endswith("Exceeds maximum queue size"):
        assert rules is not None
        assert until == since
    elif "Exceeds maximum queue size: 4 requests wait" in text:
        # Or it had to give way.
        assert until == since or (rules is not None and rules.levels)
    elif isinstance(error, InvalidArgument) and text.startswith("not "):
        assert text == f"not {own.hex()}"
    elif isinstance(error, Unavailable):
        assert text == "no instance of the model can be started: no such file"
    else:
        assert text == "the batch as a whole" or (
            isinstance(error, Internal)
            and (text in ("died", "ValueError: a mistake") or text.startswith("instance 'model_"))
        )


def check_statistics(statistics: VersionStatistics, ran: list[InferenceRequest], caller: Caller) -> None:
    """Each request is counted once: as a success, or as a failure with a reason."""
    assert statistics.success.count + statistics.fail.count == len(caller.answers)
    assert sum(statistics.failures.values()) == statistics.fail.count
    died = statistics.failures[RequestOutcome.BACKEND] + statistics.failures[RequestOutcome.WORKER_DIED]
    assert statistics.success.count + died == len(ran)


def check_order(instances: list[FakeInstance], caller: Caller) -> None:
    """Of the requests that ran, those that began earlier were answered earlier."""
    position = {each: number for number, (each, _, _) in enumerate(caller.answers)}
    for instance in instances:
        sequence = [position[each] for batch in instance.batches for each in batch]
        assert sequence == sorted(sequence)
    started = sorted(
        ((number, each) for instance in instances for number, batch in instance.started for each in batch),
        key=lambda item: item[0],
    )
    assert [position[each] for _, each in started] == sorted(position[each] for _, each in started)
