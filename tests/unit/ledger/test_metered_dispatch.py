"""A dispatcher whose leases are metered: whatever becomes of a batch, its time is charged once."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from doubles import Caller as Sink
from doubles import FakeLoop, request
from fake_instance import OK, FakeInstance
from nerite.config.options import QueueOptions
from nerite.core.request import InferenceRequest
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.instances.instance import Batch
from nerite.ledger.meter import MeterSession, VersionMeter
from nerite.ledger.row import Ending, LedgerRow, WallClock
from nerite.ledger.stage import LedgerStage, MeteredLeases
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchingRules
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder


class Choosy(FakeInstance):
    """An instance that cannot take a request with a priority, nor any batch with one."""

    def run(self, batch: Batch) -> None:
        if any(each.header.priority for each in batch):
            raise ValueError("no")
        super().run(batch)


class Metered:
    """A dispatcher behind the stage of a ledger, and the rows that came of it."""

    def __init__(self, instance: FakeInstance) -> None:
        self.rows: list[LedgerRow] = []
        self.instance = instance
        self.loop = FakeLoop()
        loop: Any = self.loop
        wall = WallClock(time.time_ns() - time.monotonic_ns())
        session = MeterSession(self.rows.append, self.rows.append, itertools.count(1), wall, lambda _: ("", ""))
        self.meter = VersionMeter("model", "1", session)
        self.meter.opened(instance, time.monotonic_ns())
        self.dispatcher = Dispatcher(
            AnyInstancePicker(DynamicBatcher(BatchingRules(8))),
            [instance],
            VersionStatistics(),
            loop,
            BusyPoll(loop, 0.0),
            LoadShedder(QueueOptions(max_requests=0, max_seconds=0), "model"),
            leases=MeteredLeases(self.meter),
        )
        self.stage = LedgerStage(self.meter, self.dispatcher)

    def ask(self, *priorities: int) -> list[InferenceRequest]:
        asked = [request(sink=Sink(), arrived_ns=time.monotonic_ns(), priority=each) for each in priorities]
        for each in asked:
            self.stage.submit(each)
        self.loop.settle()
        return asked

    @property
    def endings(self) -> list[str]:
        return [row.key.ending for row in self.rows]


@pytest.fixture
def metered() -> Metered:
    return Metered(FakeInstance())


def test_a_batch_that_is_answered(metered: Metered) -> None:
    metered.ask(0, 0, 0)
    metered.instance.finish(took_ns=900)
    assert metered.endings == [Ending.ANSWERED] * 3
    assert [row.amounts.compute_ns for row in metered.rows] == [300] * 3
    assert metered.meter.unaccounted_ns == 0


def test_a_batch_that_dies(metered: Metered) -> None:
    metered.ask(0, 0)
    metered.instance.die()
    assert metered.endings == [Ending.FAILED] * 2
    assert all(row.amounts.compute_ns > 0 for row in metered.rows)
    assert metered.meter.unaccounted_ns == 0


def test_one_that_waits_and_one_that_runs_are_cancelled(metered: Metered) -> None:
    (running,) = metered.ask(0)
    (waiting,) = metered.ask(0)
    waiting.cancel()
    running.cancel()
    assert metered.endings == [Ending.CANCELLED]
    metered.instance.finish(took_ns=50)
    assert [row.amounts.compute_ns for row in metered.rows] == [0, 50]
    assert metered.meter.unaccounted_ns == 0


def test_only_the_request_at_fault_fails() -> None:
    metered = Metered(Choosy())
    metered.ask(0, 1, 0)
    metered.instance.finish([OK], took_ns=10)
    metered.instance.finish([OK], took_ns=20)
    assert sorted(metered.endings) == [Ending.ANSWERED, Ending.ANSWERED, Ending.FAILED]
    assert metered.meter.unaccounted_ns == 0
    assert sum(row.amounts.requests for row in metered.rows) == 3


def test_the_stage_holds_nothing(metered: Metered) -> None:
    metered.ask(0)
    assert (metered.stage.pending, metered.stage.in_flight) == (0, 1)
    drained: list[int] = []
    metered.stage.when_drained(lambda: drained.append(len(metered.rows)))
    metered.instance.finish(took_ns=1)
    assert drained == [1]
