"""Loading on demand and polling with an exception planted in each step: other models are served, and nothing is lost.

Requests wait for the models "a" and "b", of which "a" fails until it is mended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nerite.config.model_parameters import DemandMode
from nerite.config.options import RepositoryOptions
from nerite.core.errors import NeriteError, NotLoaded
from nerite.core.work_loop import STALL_SECONDS
from nerite.repository import polling
from nerite.repository.catalogue import Catalogue, ModelFingerprint
from nerite.repository.demand_survey import SurveyedModel
from nerite.repository.load_waits import LoadWaits
from nerite.repository.memory_use import MeasuredLoads, MemoryUse
from nerite.repository.on_demand import OnDemandModels
from nerite.repository.polling import Poller
from nerite.scheduling.residency_table import HOST, Residence

MB = 1 << 20


class Fault(Exception):
    """What nothing foresaw."""


def version(name: str) -> Any:
    return SimpleNamespace(
        name=name, in_flight=0, holds_sequences=False, can_sleep=False, instances=(),
        statistics=SimpleNamespace(last_inference_ms=0), own_memory=None,
    )  # fmt: skip


def surveyed(name: str, megabytes: int = 10) -> SurveyedModel:
    size = {HOST: megabytes * MB}
    return SurveyedModel(name, "", DemandMode.ON_DEMAND, 0.0, (1,), "", (), size, "d", "", routed=False)


class World:
    """Models that are loaded on demand, without files and processes."""

    def __init__(self, folder: Path, loader: ThreadPoolExecutor, budget: int) -> None:
        self.broken = ""
        """Where model "a" fails."""
        self.records = Catalogue()
        self.found = {name: surveyed(name) for name in ("a", "b")}
        manager = SimpleNamespace(
            records=self.records, running=self._running, load=self._load, load_all=self._load_all,
            unload_one=self._unload, changed=lambda: None,
            sleeping=SimpleNamespace(all=list, of=lambda name: [], wake=self._wake, unload=self._unload_asleep),
        )  # fmt: skip
        gauge = SimpleNamespace(
            budget=lambda host, gpu: {HOST: host}, use=self._use, of_workers=lambda shares: {}, trim=lambda: None,
            return_large_blocks=lambda: None,
        )  # fmt: skip
        survey = SimpleNamespace(read=lambda: self.found)
        options = RepositoryOptions(host_budget=budget * MB, load_threads=4)
        measured = MeasuredLoads(folder / "measured.json")
        self.made = OnDemandModels(*cast(Any, (manager, survey, gauge, measured, options, loader)))
        self.waits = LoadWaits(60.0, 100)
        self.waits.on_wanted = lambda model, order: self.made.want(self, model, order)
        self.made.on_failed = self.waits.fail
        self.made.on_loaded = lambda model: self.waits.offer(lambda name: name == model)
        self.served: list[str] = []
        self.refused: dict[str, NeriteError] = {}

    def fail(self, place: str, name: str = "a") -> None:
        if self.broken == place and name == "a":
            raise Fault

    def _running(self) -> list[Any]:
        return [each for record in self.records for each in record.running.values()]

    async def _load(self, name: str) -> None:
        self.fail("load", name)
        self.records.open("", name).running[1] = version(name)

    async def _load_all(self, names: list[str]) -> list[Any]:
        return []

    async def _unload(self, record: Any, unless: Any = None) -> list[Any]:
        self.fail("unload", record.name)
        record.running.clear()
        return []

    async def _wake(self, name: str) -> bool:
        self.fail("wake", name)
        return False

    async def _unload_asleep(self, name: str) -> None:
        self.fail("unload asleep", name)

    def _use(self) -> MemoryUse:
        self.fail("gauge")
        return MemoryUse(0, {})

    def request(self, name: str) -> None:
        def give_up(error: NeriteError) -> None:
            self.refused[name] = error

        self.waits.hold(NotLoaded.of(name, 1), None, monotonic_ns(), lambda: self.served.append(name), give_up)


def run(tmp_path: Path, work: Callable[[World], Awaitable[None]], budget: int = 1000) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(2) as loader:
            world = World(tmp_path, loader, budget)
            await world.made.start()
            try:
                async with asyncio.timeout(60):
                    await work(world)
            finally:
                world.waits.stop(NeriteError("the test has ended"))
                await world.made.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["load", "wake", "gauge"])
def test_a_load_that_fails_ends_its_requests_and_keeps_no_other_from_being_loaded(place: str, tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.broken = place
        world.request("a")
        await until(lambda: "a" in world.refused)
        assert "incident" in world.refused["a"].message
        assert world.made.residency.residence("a") is Residence.ABSENT
        if place == "gauge":  # it is nobody's
            world.broken = ""
        world.request("b")
        await until(lambda: world.served == ["b"])

    run(tmp_path, work)


def test_decisions_that_fail_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        decide = world.made.residency.decide

        def planted(*arguments: Any) -> Any:
            world.fail("decide")
            return decide(*arguments)

        monkeypatch.setattr(world.made.residency, "decide", planted)
        world.broken = "decide"
        world.request("a")
        loop = world.made.decisions
        await until(lambda: bool(loop.failing))
        assert loop.essential and loop.waiting == 1
        world.broken = ""
        await until(lambda: world.served == ["a"])
        await until(lambda: not loop.failing)
        assert loop.waiting == 0

    run(tmp_path, work)


def test_a_model_that_cannot_be_refused_keeps_no_other_from_being_loaded(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.found = {"a": surveyed("a", 5000), "b": surveyed("b")}
        on_failed = world.made.on_failed

        def planted(model: str, error: NeriteError) -> None:
            world.fail("refuse", model)
            on_failed(model, error)

        world.made.on_failed = planted
        world.broken = "refuse"
        await world.made.start()
        world.request("a")
        world.request("b")
        await until(lambda: world.served == ["b"])

    run(tmp_path, work)


@pytest.mark.parametrize("place", ["unload", "unload asleep"])
def test_an_eviction_that_fails_is_decided_again(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        monkeypatch.setattr(world.made.residency, "measured", lambda name, size: None)  # the estimates stay
        for name in ("a", "b"):
            world.request(name)
            await until(lambda name=name: name in world.served)  # type: ignore[misc]
        world.found = {**world.found, "c": surveyed("c", 15)}
        await world.made.start()
        world.broken = place
        world.request("c")
        await until(lambda: bool(world.made.decisions.failing))
        assert "incident" in world.made.decisions.failing["the end of 'a'"]
        world.broken = ""
        await until(lambda: "c" in world.served)

    run(tmp_path, work, budget=25)


def test_requests_are_told_if_nobody_can_be_asked_to_load_their_model(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        def fails(*_: object) -> None:
            raise Fault

        world.waits.on_wanted = fails
        world.request("a")
        assert "incident" in world.refused["a"].message and not len(world.waits)

    run(tmp_path, work)


def test_a_wait_that_is_over_is_told_whatever_fails() -> None:
    async def main() -> None:
        def fails(model: str) -> str:
            raise Fault

        waits, told = LoadWaits(0.01, 10), []
        waits.obstacle_to = fails
        waits.hold(NotLoaded.of("a", 1), None, monotonic_ns(), lambda: None, told.append)
        async with asyncio.timeout(10):
            await until(lambda: bool(told))
        assert "incident" in told[0].message and not len(waits)

    asyncio.run(main())


def test_a_question_that_fails_keeps_no_other_model_from_being_offered() -> None:
    async def main() -> None:
        def is_loaded(model: str) -> bool:
            if model == "a":
                raise Fault
            return True

        waits, went_on = LoadWaits(60.0, 10), []
        for name in ("a", "b"):
            waits.hold(NotLoaded.of(name, 1), None, monotonic_ns(), lambda name=name: went_on.append(name), print)
        waits.offer(is_loaded)
        assert went_on == ["b"] and len(waits) == 1

    asyncio.run(main())


# Polling.


class Repositories:
    """Models "a" and "b", which are loaded, or gone, as the scan finds."""

    def __init__(self) -> None:
        self.records = [
            SimpleNamespace(namespace="", name=name, seen=None, running={1: 1}, routed=False) for name in ("a", "b")
        ]
        self.found: dict[tuple[str, str], ModelFingerprint] = {}
        self.broken = ""
        self.unloaded: list[str] = []
        self.scans = 0
        self.loads = asyncio.Event()

    async def poll(self) -> dict[tuple[str, str], ModelFingerprint]:
        self.scans += 1
        if self.broken == "scan":
            raise Fault
        return self.found

    async def load_all(self, names: Any) -> list[Any]:
        if list(names):
            await self.loads.wait()
        return []

    async def unload_one(self, record: Any) -> None:
        if self.broken == "unload" and record.name == "a":
            raise Fault
        self.unloaded.append(record.name)
        self.records.remove(record)


@pytest.mark.parametrize("place", ["scan", "unload"])
def test_polling_goes_on_after_whatever_fails(place: str) -> None:
    async def main() -> None:
        made = Repositories()
        poller = Poller(cast(Any, made), 0.01)
        running = asyncio.create_task(poller.run())
        made.broken = place
        async with asyncio.timeout(30):
            await until(lambda: bool(poller.loop.failing))
            if place == "unload":
                await until(lambda: made.unloaded == ["b"])
            made.broken = ""
            await until(lambda: sorted(made.unloaded) == ["a", "b"])
            await until(lambda: not poller.loop.failing)
        running.cancel()

    asyncio.run(main())


def test_a_load_that_takes_long_is_no_stall_of_the_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SETTLE_NS", 0)

    async def main() -> None:
        made = Repositories()
        made.found = {("", name): ModelFingerprint((), {}) for name in ("a", "b")}
        poller = Poller(cast(Any, made), 0.01)
        assert poller.loop.waiting == 1 and poller.loop.stall_seconds < 2 * STALL_SECONDS
        running = asyncio.create_task(poller.run())
        async with asyncio.timeout(30):
            await until(lambda: poller.loop.waiting == 0)
            made.loads.set()
            await until(lambda: poller.loop.waiting == 1)
        running.cancel()

    asyncio.run(main())
