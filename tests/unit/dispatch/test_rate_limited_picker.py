"""Models that share resources: what their dispatchers start, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller, FakeLoop, request
from fake_instance import FakeInstance
from nerite.backends.interface import InstanceContext
from nerite.config.flag import RateLimitResource
from nerite.config.options import QueueOptions
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch import dispatcher as module
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.dispatch.rate_limited import InstanceResources, RateLimitedPicker
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import InstancePlan
from nerite.models.instance_factory import RateLimitedFactory
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchingRules, QueuePolicy
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.rate_limiter import RateLimiter, ResourceClaim, ResourcePool

MS = 1_000_000
ONE = ResourceClaim(((ResourcePool("R"), 1),))


def planned(name: str, claim: ResourceClaim = ONE, *, passive: bool = False) -> InstancePlan:
    return InstancePlan(InstanceContext(name), passive, claim)


class Maker:
    """Makes instances as long as ``fails`` is False."""

    def __init__(self) -> None:
        self.fails = False
        self.closed = False

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        if self.fails:
            raise Internal("no memory")
        return [FakeInstance(plan.context.name) for plan in plans]

    def close(self) -> None:
        self.closed = True


class Model:
    """A dispatcher of limited instances, and everything around it."""

    def __init__(
        self, hall: Hall, name: str, claims: Sequence[ResourceClaim], *, max_batch_size: int = 1, **rules: Any
    ) -> None:
        self.resources = InstanceResources(hall.limiter, name)
        self.inner = Maker()
        self.maker = RateLimitedFactory(self.inner, self.resources)
        plans = [planned(f"{name}_{number}", claim) for number, claim in enumerate(claims)]
        self.instances: list[Any] = asyncio.run(self.maker.make(plans, {}))
        loop: Any = hall.loop
        decider = DynamicBatcher(BatchingRules(max_batch_size, **rules))
        self.dispatcher = Dispatcher(
            RateLimitedPicker(AnyInstancePicker(decider), self.resources),
            self.instances,
            VersionStatistics(),
            loop,
            BusyPoll(loop, 0.0),
            LoadShedder(QueueOptions(), "model"),
        )
        self.resources.granted = self.dispatcher.check_soon
        self.caller = Caller()
        self.hall = hall

    def ask(self, *rows: int, **fields: Any) -> list[InferenceRequest]:
        asked = [request(each, sink=self.caller, **fields) for each in rows or (1,)]
        for each in asked:
            self.dispatcher.submit(each)
        self.hall.loop.settle()
        return asked

    def running(self) -> list[list[InferenceRequest]]:
        return [instance.batch for instance in self.instances if instance.batch is not None]

    def finish(self, number: int = 0) -> None:
        self.instances[number].finish()
        self.hall.loop.settle()

    def error_of(self, asked: InferenceRequest) -> Any:
        (answer,) = self.caller.of(asked)
        return answer.error


class Hall:
    """What the models share."""

    def __init__(self, *limits: RateLimitResource) -> None:
        self.limiter = RateLimiter(limits)
        self.loop = FakeLoop()

    def model(self, name: str, *claims: ResourceClaim, **rules: Any) -> Model:
        return Model(self, name, claims or (ONE,), **rules)


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    made = Hall()
    made.loop.rule(monkeypatch, module)
    yield made


def test_two_models_with_one_resource_take_turns(hall: Hall) -> None:
    first, second = hall.model("first"), hall.model("second")
    one, other = first.ask()[0], second.ask()[0]
    assert first.running() == [[one]]
    assert second.running() == []
    assert (second.dispatcher.pending, second.dispatcher.in_flight) == (1, 1)
    first.finish()
    assert second.running() == [[other]]
    second.finish()
    assert second.error_of(other) is None
    assert first.ask() == first.running()[0]


def test_a_batch_is_taken_when_it_may_run(hall: Hall) -> None:
    """So what comes meanwhile is part of it."""
    first, second = hall.model("first"), hall.model("second", max_batch_size=4)
    first.ask()
    asked = second.ask() + second.ask() + second.ask()
    first.finish()
    assert second.running() == [asked]


def test_cancelled_while_it_waits_for_resources(hall: Hall) -> None:
    first, second, third = hall.model("first"), hall.model("second"), hall.model("third")
    first.ask()
    (asked,) = second.ask()
    third.ask()
    asked.cancel()
    hall.loop.settle()
    assert second.error_of(asked).code == "CANCELLED"
    first.finish()
    assert second.running() == []
    assert len(third.running()) == 1


def test_expired_while_it_waits_for_resources(hall: Hall) -> None:
    first = hall.model("first")
    second = hall.model("second", default_policy=QueuePolicy(timeout_us=5000))
    third = hall.model("third")
    first.ask()
    (asked,) = second.ask()
    third.ask()
    hall.loop.advance(6 * MS)
    assert second.error_of(asked).message == "Request timeout expired"
    first.finish()
    assert second.running() == []
    assert len(third.running()) == 1


def test_abandoned_while_it_waits_for_resources(hall: Hall) -> None:
    first, second, third = hall.model("first"), hall.model("second"), hall.model("third")
    first.ask()
    (asked,) = second.ask()
    third.ask()
    second.dispatcher.abandon(Unavailable("stopping"))
    assert second.error_of(asked).message == "stopping"
    first.finish()
    assert len(third.running()) == 1


def test_who_gathers_a_batch_holds_nothing(hall: Hall) -> None:
    patient = hall.model("patient", max_batch_size=2, max_delay_us=10_000)
    other = hall.model("other")
    asked = patient.ask()
    assert patient.running() == []
    other.ask()
    assert len(other.running()) == 1
    asked += patient.ask()
    assert patient.running() == []
    other.finish()
    assert patient.running() == [asked]
    patient.finish()
    late = patient.ask()
    hall.loop.advance(11 * MS)
    assert patient.running() == [late]


def test_instances_of_one_model(hall: Hall) -> None:
    wide = hall.model("wide", ONE, ONE, ResourceClaim(((ResourcePool("R"), 2),)))
    asked = wide.ask(1, 1, 1)
    assert wide.running() == [[asked[0]], [asked[1]]]
    # The third instance needs all there is, and is first in line.
    wide.finish(0)
    assert wide.running() == [[asked[1]]]
    wide.finish(1)
    assert wide.instances[2].batch == [asked[2]]


def test_a_worker_that_dies_gives_back_what_it_had(hall: Hall) -> None:
    first, second = hall.model("first"), hall.model("second")
    first.ask()
    second.ask()
    first.instances[0].die()
    hall.loop.settle()
    assert len(second.running()) == 1
    waiting = first.ask()
    second.finish()
    assert first.running() == []
    first.instances[0].come_back()
    hall.loop.settle()
    assert first.running() == [waiting]


def test_a_worker_that_dies_idle_waits_for_nothing(hall: Hall) -> None:
    first, second, third = hall.model("first"), hall.model("second"), hall.model("third")
    first.ask()
    second.ask()
    third.ask()
    second.instances[0].die()
    first.finish()
    assert len(third.running()) == 1


@pytest.mark.parametrize("busy", [True, False])
def test_an_instance_that_leaves(hall: Hall, busy: bool) -> None:
    first, second = hall.model("first"), hall.model("second")
    left: list[ModelInstance] = []
    if busy:
        first.ask()
    second.ask()
    first.dispatcher.remove(first.instances[0], left.append)
    assert len(second.running()) == (not busy)
    if busy:
        first.finish()
        assert len(second.running()) == 1
    assert left == first.instances


def test_an_instance_that_leaves_and_dies(hall: Hall) -> None:
    """It was to stay until its last response, which comes from the worker's grave."""
    first, second = hall.model("first", ONE, ONE), hall.model("second")
    left: list[ModelInstance] = []
    (asked,) = first.ask()
    instance = first.instances[0]
    instance.finish([None])
    first.dispatcher.remove(instance, left.append)
    instance.die()
    instance.part(asked, InferenceResponse.failed(Internal("died")), True, None)
    hall.loop.settle()
    assert left == [instance]
    first.ask()
    first.finish(1)
    second.ask()
    assert len(second.running()) == 1


def test_who_gathers_a_batch_does_not_line_up(hall: Hall) -> None:
    """Two instances that stand back for each other again and again would take no time to do so for ever."""
    patient = hall.model("patient", ONE, ONE, max_batch_size=2, max_delay_us=10_000)
    first = patient.ask(1, 1, 1)
    assert patient.running() == [first[:2]]
    patient.finish(0)
    assert patient.running() == []
    hall.loop.advance(11 * MS)
    assert patient.running() == [first[2:]]


def test_models_with_greater_needs_come_and_go(hall: Hall) -> None:
    first, second = hall.model("first"), hall.model("second")
    first.ask()
    second.ask()
    assert second.running() == []
    large = hall.model("large", ResourceClaim(((ResourcePool("R"), 2),)))
    hall.loop.settle()
    assert len(second.running()) == 1
    large.maker.close()
    assert large.inner.closed
    first.finish()
    second.finish()
    first.ask()
    second.ask()
    assert (len(first.running()), second.running()) == (1, [])


def test_what_cannot_be_made_leaves_no_trace() -> None:
    hall = Hall(RateLimitResource("R", 1))
    maker = Maker()
    limited = RateLimitedFactory(maker, InstanceResources(hall.limiter, "model"))
    too_large = planned("large", ResourceClaim(((ResourcePool("R"), 2),)))
    with pytest.raises(InvalidArgument, match="minimum required count is 2"):
        asyncio.run(limited.make([planned("a"), too_large], {}))
    maker.fails = True
    with pytest.raises(Internal, match="no memory"):
        asyncio.run(limited.make([planned("a")], {}))
    # Otherwise the other kind of R would be a conflict.
    hall.limiter.enter("other", [ResourceClaim(((ResourcePool("R", 0), 1),))], lambda: None)


def test_passive_instances_need_nothing() -> None:
    hall = Hall(RateLimitResource("R", 1))
    limited = RateLimitedFactory(Maker(), InstanceResources(hall.limiter, "model"))
    assert (
        len(asyncio.run(limited.make([planned("p", ResourceClaim(((ResourcePool("R"), 9),)), passive=True)], {}))) == 1
    )


@given(st.data())
def test_every_request_is_answered(data: st.DataObject) -> None:
    hall = Hall()
    needs = st.dictionaries(st.sampled_from("RQ"), st.integers(1, 2), max_size=2)

    def claim() -> ResourceClaim:
        return ResourceClaim(
            tuple((ResourcePool(name), count) for name, count in data.draw(needs).items()), data.draw(st.integers(0, 2))
        )

    models = [
        hall.model(str(number), *[claim() for _ in range(data.draw(st.integers(1, 2)))], max_batch_size=2)
        for number in range(data.draw(st.integers(1, 3)))
    ]
    asked: list[tuple[Model, InferenceRequest]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        model = data.draw(st.sampled_from(models))
        instance = data.draw(st.sampled_from(model.instances))
        what = data.draw(st.sampled_from(["ask", "ask", "finish", "die", "cancel"]))
        if what == "ask":
            asked += [(model, each) for each in model.ask()]
        elif what == "finish" and instance.batch is not None:
            instance.finish()
        elif what == "die":
            if instance.usable:
                instance.die()
            else:
                instance.come_back()
        elif what == "cancel" and asked:
            data.draw(st.sampled_from(asked))[1].cancel()
        hall.loop.settle()
    for model in models:
        for instance in model.instances:
            if not instance.usable:
                instance.come_back()
    hall.loop.settle()
    while working := [instance for model in models for instance in model.instances if instance.batch is not None]:
        working[0].finish()
        hall.loop.settle()
    assert [len(model.caller.of(each)) for model, each in asked] == [1] * len(asked)
    assert [model.dispatcher.in_flight for model in models] == [0] * len(models)
