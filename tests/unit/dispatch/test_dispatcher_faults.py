"""Whatever raises, each request ends exactly once, and each instance comes back."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher_bench import UNBOUNDED
from doubles import FakeLoop, header
from fake_instance import OK, FakeInstance
from nerite.config.model_config import ModelConfig, ModelSequenceBatching
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import internal_errors
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch import dispatcher as module
from nerite.dispatch import sequence_picker
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.dispatch.sequence_picker import SequencePicker
from nerite.instances.instance import Batch, ModelInstance
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchingRules, QueuePolicy
from nerite.scheduling.dynamic_batcher import DefaultScheduler, DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.sequence import SequenceRequest, SequenceRules


@pytest.fixture(scope="module", autouse=True)
def objects_of_other_tests() -> Iterator[None]:
    """Leave out what there is already when lost requests are searched among all objects: it may be millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


KINDS = ("one by one", "dynamic", "priorities", "ahead", "direct", "oldest")


class Faults:
    """Says when something is to raise."""

    def __init__(self, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self.share = share

    def strike(self) -> None:
        if self._random.random() < self.share:
            raise ZeroDivisionError("planted")


class FaultyRoster:
    """A roster any of whose methods may raise, before or after it has done its work."""

    FAULTY = ("offer", "choose", "ended", "settle", "add_instance", "remove_instance", "retire", "holds", "wake_at",
              "expire", "withdraw", "drain", "resume", "finish", "server_stops")  # fmt: skip

    def __init__(self, picker: Any, faults: Faults) -> None:
        assert all(hasattr(picker, name) for name in self.FAULTY)
        self._picker = picker
        self._faults = faults

    def renewed(self) -> FaultyRoster:
        return FaultyRoster(self._picker.renewed(), self._faults)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._picker, name)
        if name not in self.FAULTY:
            return value

        def call(*arguments: Any) -> Any:
            self._faults.strike()
            result = value(*arguments)
            self._faults.strike()
            return result

        return call


class FaultyRunner(FakeInstance):
    """An instance that cannot take some batches."""

    faults: Faults

    def run(self, batch: Batch) -> None:
        self.faults.strike()
        super().run(batch)


class FaultyCaller:
    """A sink that may raise, before it has taken an answer; it counts the last answers that it has taken."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.attempts = 0
        self.finals: list[InferenceResponse] = []

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.attempts += 1
        self._faults.strike()
        if final:
            self.finals.append(response)


def picker(kind: str) -> Any:
    if kind in ("direct", "oldest"):
        config = ModelConfig(name="model", max_batch_size=3, sequence_batching=ModelSequenceBatching())
        batching = BatchingRules(3) if kind == "oldest" else None
        return SequencePicker(config, SequenceInputs(config, Path()), SequenceRules("model", 3, 10_000, batching))
    if kind == "one by one":
        return AnyInstancePicker(DefaultScheduler())
    if kind == "priorities":
        policy = QueuePolicy(timeout_us=1000, max_size=4)
        return AnyInstancePicker(DynamicBatcher(BatchingRules(4, levels=3, default_level=2, default_policy=policy)))
    return AnyInstancePicker(DynamicBatcher(BatchingRules(4, preferred_sizes=(2,), max_delay_us=500)))


class TickingLoop(FakeLoop):
    """Its clock never shows the same time twice."""

    def now(self) -> int:
        self.now_ns += 1
        return self.now_ns


class World:
    """A dispatcher whose surroundings fail by chance, and what is asked of it."""

    def __init__(self, kind: str, faults: Faults, patch: pytest.MonkeyPatch) -> None:

        self.kind = kind
        self.faults = faults
        self.loop = TickingLoop()
        self.loop.rule(patch, module, sequence_picker)
        self.instances = [FaultyRunner(f"model_{number}", ahead=kind == "ahead") for number in range(2)]
        for instance in self.instances:
            instance.faults = faults
        loop: Any = self.loop
        sound = faults.share
        faults.share = 0
        self.of = Dispatcher(
            FaultyRoster(picker(kind), faults),  # type: ignore[arg-type]
            self.instances,
            VersionStatistics(),
            loop,
            BusyPoll(loop, 0.0),
            LoadShedder(UNBOUNDED, "model"),
        )
        faults.share = sound
        self.asked: list[tuple[InferenceRequest, FaultyCaller]] = []
        self.retiring: list[FaultyRunner] = []

    def ask(self, number: int, sequence: int) -> None:
        caller = FaultyCaller(self.faults)
        of = header(1, priority=number % 3 + 1 if self.kind == "priorities" else 0)
        if self.kind in ("direct", "oldest"):
            of = header(1, sequence_id=sequence + 1, sequence_start=number % 2 == 0, sequence_end=number % 5 == 0)
        request = InferenceRequest(of, [bytes(4)], caller, self.loop.now_ns)
        self.asked.append((request, caller))
        self.of.submit(SequenceRequest(request) if self.kind in ("direct", "oldest") else request)

    def finish(self, which: int) -> None:
        instance = self.instances[which % len(self.instances)]
        if instance.batch is not None:
            upcoming = instance.next
            instance.finish()
            if upcoming is not None and instance.batch is None:
                instance.batch = upcoming

    def do(self, action: str, number: int) -> None:
        if action == "ask":
            self.ask(number, number % 4)
        elif action == "finish":
            self.finish(number)
        elif action == "cancel" and self.asked:
            self.asked[number % len(self.asked)][0].cancel()
        elif action == "die" and self.kind != "ahead":  # those that take a second batch live in this process
            instance = self.instances[number % 2]
            if instance.usable:
                instance.die()
        elif action == "come back":
            instance = self.instances[number % 2]
            if not instance.usable:
                instance.come_back()
        elif action == "replace":
            instance = self.instances[number % 2]
            if instance not in self.retiring:
                self.retiring.append(instance)
                self.of.remove(instance, self.left)
        elif action == "wait":
            self.loop.advance(700_000)
        self.loop.settle()

    def left(self, instance: ModelInstance) -> None:
        """Put another instance in the place of one that has left."""
        assert isinstance(instance, FaultyRunner)
        self.retiring.remove(instance)
        other = FaultyRunner(f"{instance.name}*", ahead=self.kind == "ahead")
        other.faults = self.faults
        self.instances[self.instances.index(instance)] = other
        self.loop.call_soon(lambda: self.of.add(other))

    def quiet(self) -> None:
        """Without faults from here on: let everything come to its end.

        An audit restores what a fault in the middle of a recovery has left.
        """
        self.faults.share = 0
        for instance in self.instances:
            if not instance.usable:
                instance.come_back()
        for _ in range(10 * len(self.asked) + 20):
            self.of.audit()
            self.loop.advance(20_000_000)
            for which in range(2):
                self.finish(which)
        self.loop.settle()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "finish", "finish", "cancel", "die", "come back", "replace", "wait"]),
        st.integers(0, 20),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@given(actions=ACTIONS, seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.02, 0.1, 0.4]))
@example(actions=[("ask", 2), ("ask", 4), ("replace", 0), ("replace", 1)], seed=0, share=0.0)
def test_each_request_ends_once_and_each_instance_comes_back(
    kind: str, actions: list[tuple[str, int]], seed: int, share: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(kind, Faults(seed, share), patch)
        for action, number in actions:
            world.do(action, number)
        world.quiet()
        for request, caller in world.asked:
            assert request.finished
            assert len(caller.finals) <= 1, "answered twice"
            assert caller.attempts, "never answered"
        assert world.of.in_flight == 0
        assert world.of.audit() == []
        # And it goes on: a new request is answered, on each instance.
        world.asked.clear()
        for number in range(2):
            world.ask(2 * number, 7 + number)
        world.quiet()
        assert [[answer.error for answer in caller.finals] for _, caller in world.asked] == [[None], [None]]
        drained: list[int] = []
        world.of.when_drained(lambda: drained.append(1))
        assert drained == [1]


def _dispatcher(loop: FakeLoop, instance: FakeInstance, kind: str = "one by one", batch: int = 3) -> Dispatcher:
    of: Any = AnyInstancePicker(DynamicBatcher(BatchingRules(batch))) if kind == "dynamic" else picker(kind)
    any_loop: Any = loop
    return Dispatcher(
        of, [instance], VersionStatistics(), any_loop, BusyPoll(any_loop, 0.0), LoadShedder(UNBOUNDED, "model")
    )


class Picky(FakeInstance):
    """An instance that cannot take a batch with a certain request in it."""

    poison: InferenceRequest

    def run(self, batch: Batch) -> None:
        if any(request.origin is self.poison for request in batch):
            raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")
        super().run(batch)


@pytest.mark.parametrize("kind", ["dynamic", "direct", "oldest"])
def test_a_request_that_cannot_be_sent_fails_alone(kind: str) -> None:
    loop = FakeLoop()
    instance = Picky()
    of = _dispatcher(loop, instance, kind)
    sequences = kind != "dynamic"
    faults = Faults(0, 0)
    callers = [FaultyCaller(faults) for _ in range(3)]
    requests = []
    for number, caller in enumerate(callers):
        asked = header(sequence_id=number + 1, sequence_start=sequences)
        requests.append(InferenceRequest(asked, [bytes(4)], caller, 0))
    instance.poison = requests[1]
    before = internal_errors.counts["dispatcher"]
    for request in requests:
        of.submit(SequenceRequest(request) if sequences else request)
    loop.settle()
    while instance.batch is not None:
        instance.finish()
        loop.settle()
    assert [caller.finals[0].error is None for caller in callers] == [True, False, True]
    assert "incident" in str(callers[1].finals[0].error)
    assert of.in_flight == 0 and of.audit() == []
    # The whole batch, and the one request.
    assert internal_errors.counts["dispatcher"] == before + 1
    if kind == "direct":  # each kept its slot
        assert [len(batch) for batch in instance.batches] == [1, 3]


def test_the_audit_gives_back_an_instance_that_was_lost() -> None:
    loop = FakeLoop()
    instance = FakeInstance()
    of = _dispatcher(loop, instance)
    faults = Faults(0, 0)
    callers = [FaultyCaller(faults) for _ in range(2)]
    of.submit(InferenceRequest(header(), [bytes(4)], callers[0], 0))
    loop.settle()
    instance.batch = None  # as if the instance had forgotten its batch
    instance.batches.clear()
    of.submit(InferenceRequest(header(), [bytes(4)], callers[1], 0))
    loop.settle()
    assert of.sound
    assert len(of.audit()) == 1 and not of.sound
    loop.settle()
    assert "lost in the server" in str(callers[0].finals[0].error)
    instance.finish()
    assert callers[1].finals[0].error is None
    assert of.audit() == [] and of.sound


def test_the_audit_looks_at_a_queue_that_was_forgotten() -> None:
    loop = FakeLoop()
    instance = FakeInstance()
    of = _dispatcher(loop, instance)
    caller = FaultyCaller(Faults(0, 0))
    with pytest.MonkeyPatch.context() as patch:
        loop.rule(patch, module)
        of.submit(InferenceRequest(header(), [bytes(4)], caller, 0))
        loop.forget()  # as if an exception had ended the turn before anything was done
        assert of.audit() == []
        loop.advance(1_000_000_000)
        assert of.audit() == ["model 'model': 1 requests waited beside an idle instance"]
        instance.finish()
    assert caller.finals[0].error is None


def test_the_audit_finds_nothing_while_all_is_well() -> None:
    loop = FakeLoop()
    instance = FakeInstance()
    of = _dispatcher(loop, instance, "dynamic")
    caller = FaultyCaller(Faults(0, 0))
    requests = [InferenceRequest(header(), [bytes(4)], caller, 0) for _ in range(7)]
    for request in requests:
        of.submit(request)
        assert of.audit() == []
    loop.settle()
    assert of.audit() == []
    instance.part(requests[0], OK, False, ExecutionTimes())
    instance.finish([None, OK, OK])
    loop.settle()
    assert of.audit() == [] == of.audit()
    instance.part(requests[0], OK, True, ExecutionTimes())
    of.abandon(Unavailable("stopping"))
    instance.finish()
    assert of.audit() == [] and of.in_flight == 0


def test_a_sink_that_raises_costs_nobody_else_anything() -> None:
    loop = FakeLoop()
    instance = FakeInstance()
    of = _dispatcher(loop, instance, "dynamic")
    broken, sound = FaultyCaller(Faults(0, 1)), FaultyCaller(Faults(0, 0))
    for caller in (broken, sound, sound):
        of.submit(InferenceRequest(header(), [bytes(4)], caller, 0))
    loop.settle()
    instance.finish()
    assert broken.attempts == 2, "the answer, and the error that says that it failed"
    assert [answer.error for answer in sound.finals] == [None, None]
    assert of.in_flight == 0 and of.audit() == []
