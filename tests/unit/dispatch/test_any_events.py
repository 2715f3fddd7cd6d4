"""Whatever happens to a model, in whatever order: every request is answered once, and nothing is left behind."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles import Caller, FakeLoop, request
from fake_instance import OK, FakeInstance
from nerite.backends.interface import InstanceContext
from nerite.config.model_config import ModelConfig, ModelSequenceBatching
from nerite.config.options import QueueOptions
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, Reschedule
from nerite.dispatch import dispatcher as dispatcher_module
from nerite.dispatch import sequence_picker
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.dispatch.interface import SelectivePicker
from nerite.dispatch.rate_limited import InstanceResources, RateLimitedPicker
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.dispatch.sequence_picker import SequencePicker
from nerite.instances.placement import InstancePlan
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchingRules
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.rate_limiter import RateLimiter, ResourceClaim, ResourcePool
from nerite.scheduling.sequence import SequenceRequest, SequenceRules

MS = 1_000_000
ITERATIVE = ("iterative", "in turns")
KINDS = ("any", "any, in order", "direct", "direct, patient", "oldest", "oldest, in order", "iterative", "in turns")


def picker_of(kind: str) -> SelectivePicker:
    """The roster of a model with batches of two rows; its sequences may be idle for 5 ms."""
    patient = 2000 if kind == "direct, patient" else 0
    if kind.startswith("any"):
        return AnyInstancePicker(DynamicBatcher(BatchingRules(2, preferred_sizes=(2,), max_delay_us=1000)))
    batching = BatchingRules(2) if kind.startswith("oldest") or kind == "in turns" else None
    config = ModelConfig(
        name="model", max_batch_size=2, sequence_batching=ModelSequenceBatching(iterative_sequence=kind in ITERATIVE)
    )
    rules = SequenceRules("model", 2, 5000, batching, max_delay_us=patient, min_utilization=1.0 if patient else 0.0)
    return SequencePicker(config, SequenceInputs(config, Path()), rules)


class Model:
    """A dispatcher, its instances, and everybody who asks."""

    def __init__(self, loop: FakeLoop, kind: str, limiter: RateLimiter | None) -> None:
        self.loop: Any = loop
        self.kind = kind
        self.caller = Caller()
        self.asked: list[InferenceRequest] = []
        self.mistakes = 0
        """Requests that were refused because of what they say."""
        self.statistics = VersionStatistics()
        self.resources = None if limiter is None else InstanceResources(limiter, "model")
        self.numbers = itertools.count()
        self.left: list[Any] = []
        self.open: list[tuple[FakeInstance, InferenceRequest]] = []
        """Requests whose responses come one by one."""
        self.instances = [self.instance(), self.instance()]
        picker = picker_of(kind)
        self.dispatcher = Dispatcher(
            picker if self.resources is None else RateLimitedPicker(picker, self.resources),
            self.instances,
            self.statistics,
            self.loop,
            BusyPoll(self.loop, 0.0),
            LoadShedder(QueueOptions(max_requests=12), "model"),
            preserve_ordering=kind.endswith("in order") or kind == "in turns",
        )
        if self.resources is not None:
            self.resources.granted = self.dispatcher.check_soon

    def instance(self) -> FakeInstance:
        instance = FakeInstance(f"model_{next(self.numbers)}")
        if self.resources is not None:
            plan = InstancePlan(InstanceContext(instance.name), False, ResourceClaim(((ResourcePool("R"), 1),)))
            (seat,) = self.resources.enter([plan])
            assert seat is not None
            self.resources.seat(instance, seat)
        return instance

    def ask(self, sequence: int, start: bool, end: bool, timeout_us: int) -> None:
        fields = {
            "sequence_id": 0 if self.kind in ITERATIVE else sequence,
            "sequence_start": start,
            "sequence_end": end,
        }
        alone = self.kind.startswith("any")
        outer = request(
            sink=self.caller, arrived_ns=self.loop.now_ns, timeout_us=timeout_us, **({} if alone else fields)
        )
        self.asked.append(outer)
        if alone:
            self.dispatcher.submit(outer)
            return
        self.dispatcher.submit(SequenceRequest(outer))
        if outer.finished and isinstance(self.caller.of(outer)[0].error, InvalidArgument):
            self.mistakes += 1

    def finish(self, instance: FakeInstance, how: int) -> None:
        """How: 0 answers, 1 fails, 2 answers one by one, 3 wants those that have not begun to be answered once more."""
        if instance.batch is None:
            return
        real = [each for each in instance.batch if each.sink is self.caller]
        answers: list[InferenceResponse | None] = []
        for each in instance.batch:
            if each not in real or how == 0 or (how == 3 and self.kind not in ITERATIVE):
                answers.append(OK)
            elif how == 1:
                answers.append(InferenceResponse.failed(Internal("no")))
            elif how == 2:
                answers.append(None)
                self.open.append((instance, each))
            else:
                instance.part(each, OK, False, ExecutionTimes())
                answers.append(Reschedule(None))
        instance.finish(answers)

    def part(self, number: int, final: bool) -> None:
        if self.open:
            instance, each = self.open[number % len(self.open)]
            instance.part(each, EMPTY if final else OK, final, ExecutionTimes())
            if final:
                self.open.remove((instance, each))

    def die(self, instance: FakeInstance) -> None:
        """As ``RemoteInstance`` does it: the news, then what was open, then the batch."""
        instance.usable = False
        instance.on_usable(instance)
        for each in [each for owner, each in self.open if owner is instance]:
            self.open.remove((instance, each))
            instance.part(each, InferenceResponse.failed(Internal("died")), True, None)
        if instance.batch is not None:
            batch, instance.batch = instance.batch, None
            instance.done(instance, batch, [InferenceResponse.failed(Internal("died"))] * len(batch), None)

    def leave(self, instance: FakeInstance) -> None:
        self.instances.remove(instance)
        self.left.append(instance)
        self.dispatcher.remove(instance, self.left.remove)

    def come(self) -> None:
        instance = self.instance()
        self.instances.append(instance)
        self.dispatcher.add(instance)

    @property
    def present(self) -> list[FakeInstance]:
        return [*self.instances, *self.left]


EVENT = st.tuples(
    st.sampled_from(
        ["ask", "ask", "ask", "finish", "finish", "part", "cancel", "pause", "resume", "die", "leave", "come", "pass"]
    ),
    st.integers(0, 40),
    st.integers(0, 3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(st.sampled_from(KINDS), st.booleans(), st.booleans(), st.lists(EVENT, max_size=40))
def test_any_events(
    monkeypatch: pytest.MonkeyPatch, kind: str, limited: bool, drained: bool, events: list[tuple[str, int, int]]
) -> None:
    loop = FakeLoop()
    loop.rule(monkeypatch, dispatcher_module, sequence_picker)
    limiter = RateLimiter() if limited else None
    model = Model(loop, kind, limiter)
    for what, number, how in events:
        instance = model.present[number % len(model.present)]
        if what == "ask":
            model.ask(1 + number % 5, how in (0, 1), how in (1, 2), 3000 if number > 30 else 0)
        elif what == "finish":
            model.finish(instance, how)
        elif what == "part":
            model.part(number, how == 0)
        elif what in ("cancel", "pause", "resume") and model.asked:
            asked = model.asked[number % len(model.asked)]
            asked.cancel() if what == "cancel" else asked.pause(what == "pause")
        elif what == "die":
            if instance.usable:
                model.die(instance)
            elif instance in model.instances:
                instance.come_back()
        elif what == "leave" and len(model.instances) > 1 and instance in model.instances:
            model.leave(instance)
        elif what == "come" and len(model.present) < 5:
            model.come()
        elif what == "pass":
            loop.advance(number * MS // 4)
        if how != 3:
            loop.settle()
    gone: list[bool] = []
    if drained:
        model.dispatcher.when_drained(lambda: gone.append(True))
    for instance in [instance for instance in model.instances if not instance.usable]:
        instance.come_back()
    for asked in model.asked:
        asked.pause(False)
    loop.settle()
    for _ in range(200):
        loop.advance(0 if drained else 10 * MS)
        while model.open:
            model.part(0, True)
        loop.settle()
        working = [instance for instance in model.present if instance.batch is not None]
        if working:
            model.finish(working[0], 0)
            loop.settle()
        elif not model.dispatcher.in_flight:
            break
        else:
            loop.advance(3 * MS)
    answers = [[final for each, _, final in model.caller.answers if each is asked].count(True) for asked in model.asked]
    assert answers == [1] * len(model.asked)
    assert model.dispatcher.in_flight == 0
    assert model.dispatcher.settled
    assert gone == [True] * drained
    loop.advance(10 * MS)
    assert not model.left
    assert loop.next_timer is None
    assert model.statistics.success.count + model.statistics.fail.count == len(model.asked) - model.mistakes
    if limiter is not None:
        assert not any(limiter.taken.values())
        assert not limiter.queue
        assert len(limiter.seats) == len(model.instances)
