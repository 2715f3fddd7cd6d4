"""Instances of backends that run in the server, on cores of their own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from doubles import request
from nerite.backends.interface import Instance, InstanceContext
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import InstancePlan
from nerite.models.instance_factory import InProcessFactory
from nerite.scheduling.rate_limiter import ResourceClaim

CORE = min(os.sched_getaffinity(0))
ANY = os.sched_getaffinity(0)


class Notes:
    """A model, and its instance, that note on which cores they run."""

    def __init__(self) -> None:
        self.made_on: set[int] = set()
        self.executed_on: set[int] = set()
        self.thread: threading.Thread | None = None

    def instance(self, context: InstanceContext) -> Instance:
        self.made_on = os.sched_getaffinity(0)
        return self

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        self.executed_on = os.sched_getaffinity(0)
        self.thread = threading.current_thread()
        return [EMPTY] * len(requests)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give back."""


def executed(cores: tuple[int, ...], times: int, *, on_loop_only: bool = False) -> Notes:
    """Make an instance on these cores, and have it execute."""
    notes = Notes()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as loader:
            maker = InProcessFactory(notes, loop, loader, None, on_loop_only=on_loop_only)
            (instance,) = await maker.make(
                [InstancePlan(InstanceContext("m_0", cores=cores), False, ResourceClaim())], {}
            )
        over = asyncio.Event()
        instance.done = lambda *_: over.set()
        for _ in range(times):
            over.clear()
            instance.run([request()])
            await over.wait()
        await closed(instance)

    asyncio.run(run())
    return notes


async def closed(instance: ModelInstance) -> None:
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    instance.close(lambda: over.set_result(None))
    await over


def test_instances_are_made_and_execute_on_their_cores() -> None:
    # So many brief executions that they would move to the loop, if they might.
    notes = executed((CORE,), 200)
    assert (notes.made_on, notes.executed_on) == ({CORE}, {CORE})
    assert notes.thread is not threading.current_thread()
    assert os.sched_getaffinity(0) == ANY


def test_others_run_anywhere() -> None:
    notes = executed((), 1)
    assert (notes.made_on, notes.executed_on) == (ANY, ANY)


def test_the_loop_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    notes = executed((CORE,), 1, on_loop_only=True)
    assert notes.executed_on == ANY
    assert "'m_0' runs on the server's loop: its host policy is ignored" in caplog.text
