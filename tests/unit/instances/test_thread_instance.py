"""An instance with a thread of its own, on a real loop."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import ParamSpec

import pytest

from doubles import request
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.instances.in_process import ThreadInstance
from nerite.instances.instance import Batch, BriefExecutionPolicy, ModelInstance

Parameters = ParamSpec("Parameters")


def on_a_loop(test: Callable[Parameters, Coroutine[None, None, None]]) -> Callable[Parameters, None]:
    @functools.wraps(test)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run


OK = InferenceResponse(ResponseHeader("model", "1", ()))


class Model:
    """Notes in which thread what is called."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.threads: list[threading.Thread] = []
        self.closed_in: threading.Thread | None = None
        self.wait = wait

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        self.threads.append(threading.current_thread())
        self.wait()
        return [OK] * len(requests)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        self.closed_in = threading.current_thread()


class Bench:
    """A runner and what it reports."""

    def __init__(self, model: Model, *, on_loop: bool = True) -> None:
        self.instance = ThreadInstance("model_0", model, asyncio.get_running_loop(), on_loop=on_loop)
        self.instance.done = self._done
        self.finished: list[Batch] = []
        self._more = asyncio.Event()

    def _done(
        self,
        instance: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse],
        timings: ExecutionTimes | None,
    ) -> None:
        assert instance is self.instance and list(responses) == [OK] * len(batch) and timings is not None
        self.finished.append(batch)
        self._more.set()

    async def until(self, count: int) -> None:
        while len(self.finished) < count:
            self._more.clear()
            await self._more.wait()

    async def one_by_one(self, count: int) -> None:
        for _ in range(count):
            finished = len(self.finished)
            self.instance.run([request()])
            await self.until(finished + 1)

    async def close(self) -> None:
        closed = asyncio.Event()
        self.instance.close(closed.set)
        await closed.wait()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, executions are brief."""
    monkeypatch.setattr(BriefExecutionPolicy, "ran_on_loop", lambda self, took_ns: None)
    in_thread = BriefExecutionPolicy.ran_in_thread
    monkeypatch.setattr(BriefExecutionPolicy, "ran_in_thread", lambda self, computed_ns, took_ns: in_thread(self, 0, 0))


@on_a_loop
async def test_a_batch_runs_in_the_thread_and_another_goes_ahead() -> None:
    gate = threading.Event()
    model = Model(gate.wait)
    bench = Bench(model)
    first, second = [request()], [request(), request()]
    bench.instance.run(first)
    bench.instance.run(second)
    assert bench.finished == []
    gate.set()
    await bench.until(2)
    assert bench.finished == [first, second]
    (thread,) = set(model.threads)
    assert thread is not threading.main_thread()
    await bench.close()
    assert model.closed_in is thread


@on_a_loop
async def test_a_batch_is_freed_while_the_thread_waits_for_the_next() -> None:
    class Watched(list[InferenceRequest]):
        pass

    bench = Bench(Model(), on_loop=False)
    batch = Watched([request()])
    freed = threading.Event()
    weakref.finalize(batch, freed.set)
    bench.instance.run(batch)
    await bench.until(1)
    bench.finished.clear()
    del batch
    assert await asyncio.to_thread(freed.wait, 10)
    await bench.close()


@on_a_loop
async def test_a_brief_model_moves_to_the_loop(brief: None) -> None:
    model = Model()
    bench = Bench(model)
    await bench.one_by_one(10)
    assert threading.main_thread() not in model.threads[:8]
    assert set(model.threads[8:]) == {threading.main_thread()}
    (thread,) = set(model.threads[:8])
    await asyncio.to_thread(thread.join)
    await bench.close()


@on_a_loop
async def test_nothing_runs_on_the_loop_while_the_thread_is_at_work(brief: None) -> None:
    gate = threading.Event()
    gate.set()
    model = Model(gate.wait)
    bench = Bench(model)
    await bench.one_by_one(7)
    gate.clear()
    eighth, ninth = [request()], [request()]
    bench.instance.run(eighth)
    bench.instance.run(ninth)
    gate.set()
    await bench.until(9)
    assert bench.finished[-2:] == [eighth, ninth]
    assert threading.main_thread() not in model.threads
    await bench.close()


@on_a_loop
async def test_an_instance_on_an_accelerator_stays_in_its_thread(brief: None) -> None:
    model = Model()
    bench = Bench(model, on_loop=False)
    await bench.one_by_one(20)
    assert threading.main_thread() not in model.threads
    await bench.close()


@on_a_loop
async def test_an_instance_that_never_ran_is_closed_too() -> None:
    model = Model()
    await Bench(model).close()
    assert model.closed_in is not None
