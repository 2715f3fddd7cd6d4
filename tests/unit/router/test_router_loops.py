"""Loops of the router with an exception planted in each step: other work goes on, and what fails is listed and heals.

Each case looks at two units, "a" and "b", of which "a" fails until it is mended.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_exchange import made_pool
from test_pool_rollouts import World as RolloutWorld

from nerite.admission.controller import AdmissionController
from nerite.admission.policy import parse_policy
from nerite.admission.ticket import TicketEnding
from nerite.autoscaling.policy import ScalingPolicy
from nerite.balancing.member import Member
from nerite.balancing.model_placement import ModelPlacement
from nerite.cluster.settings import MemberSource, PlacementSettings, PoolSettings
from nerite.config.rollout_spec import WhenLost
from nerite.core.errors import NeriteError
from nerite.core.failures import internal_errors
from nerite.core.request import Caller
from nerite.core.work_loop import WorkLoop
from nerite.rollouts.fleet import FleetRollout
from nerite.router import discovery, placement, pool_rollouts
from nerite.router.admission import Admission, AdmissionRequest, RouterAdmission
from nerite.router.discovery import Discovery
from nerite.router.health import HealthChecks
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.member_memory import MemoryReports
from nerite.router.placement import PoolPlacement
from nerite.router.pools import MemberIndex, PoolTable, RouterPool
from nerite.router.ray_members import RayMembers
from nerite.router.scaling import RouterScaling

PAGE = b'nv_cpu_memory_total_bytes 1000\nnerite_model_memory_bytes{model="m",version="1"} 10\n'


class Fault(Exception):
    """What nothing foresaw."""


class Switch:
    """Raises for what is named "a" until it is mended."""

    def __init__(self, *, broken: bool = True) -> None:
        self.broken = broken

    def __call__(self, name: str) -> None:
        if self.broken and name == "a":
            raise Fault


class Members(HttpMembers):
    """Members that answer what a case needs; "a" fails."""

    def __init__(self, switch: Switch) -> None:
        super().__init__(1.0)
        self._switch = switch

    async def ask(
        self, member: Member, method: str, path: str, body: bytes = b"", seconds: float = 5.0, fields: bytes = b""
    ) -> MemberAnswer:
        self._switch(member.name.partition(" ")[0])
        return MemberAnswer(200, PAGE if path == "/metrics" else b"[]")


@dataclass
class Case:
    """A loop."""

    loop: WorkLoop
    turn: Callable[[], Awaitable[object]]
    """One turn of it."""
    done: Callable[[], set[str]]
    """What was handled so far."""


def metrics_members(pool: RouterPool) -> None:
    pool.set_members([Member(name, f"{name}:80", metrics=f"{name}:82") for name in ("a", "b")])
    for name in ("a", "b"):
        pool.set_ready(name, True, ("m",))


def health_checks(switch: Switch) -> Case:
    pool = made_pool("p", "a", "b")
    checks = HealthChecks([pool], Members(switch))
    (work, _) = checks.works()
    return Case(work.loop, checks.check_all, lambda: {each.name for each in pool.ready_members})


def memory_pages(switch: Switch) -> Case:
    pool = made_pool("p")
    metrics_members(pool)
    reports = MemoryReports(pool, Members(switch), lambda: None)
    return Case(reports.loop, reports.read_all, lambda: {name for name in ("a", "b") if reports.total(name)})


def sizes_of_models(switch: Switch) -> Case:
    pool = made_pool("p")
    metrics_members(pool)
    told: set[str] = set()

    def changed() -> None:
        told.add("b")
        switch("a")
        told.add("a")

    reports = MemoryReports(pool, Members(Switch(broken=False)), changed)
    return Case(reports.loop, reports.read_all, lambda: told)


class Autoscaler:
    """Pools "a" and "b", whose number of members is wanted anew in each turn."""

    def __init__(self) -> None:
        policy = ScalingPolicy(least=0, most=3, concurrency=1.0)
        self.pools = [RouterPool(PoolSettings(name, MemberSource(), scaling=policy)) for name in ("a", "b")]
        self.scaling = RouterScaling(self.pools)
        self.observed: set[str] = set()

    async def turn(self) -> None:
        for pool in self.pools:
            assert pool.demand is not None
            pool.demand.turned_away += 1
        running = asyncio.create_task(self.scaling.run())
        await asyncio.sleep(0.35)
        running.cancel()


def autoscaler(switch: Switch) -> Case:
    made = Autoscaler()
    for name, scaled in made.scaling.scaled.items():

        def observe(seconds: float, now: float, name: str = name) -> bool:
            switch(name)
            made.observed.add(name)
            return False

        scaled.observe = observe  # type: ignore[method-assign]
    return Case(made.scaling.loop, made.turn, lambda: made.observed)


def observers_of_the_autoscaler(switch: Switch) -> Case:
    made = Autoscaler()

    def observer(name: str) -> Callable[[object], None]:
        def changed(_: object) -> None:
            switch(name)
            made.observed.add(name)

        return changed

    for name in ("a", "b"):
        made.scaling.observe(observer(name))
    return Case(made.scaling.loop, made.turn, lambda: made.observed)


def placing(method: str) -> Callable[[Switch], Case]:
    """Return the case of a step of placement: models and members "a" and "b", and this method of the decider."""

    def make(switch: Switch) -> Case:
        handled: set[str] = set()

        class Decider(ModelPlacement):
            pass

        def planted(self: ModelPlacement, name: str, *rest: Any, **more: Any) -> Any:
            switch(name)
            handled.add(name)
            return getattr(ModelPlacement, method)(self, name, *rest, **more)

        setattr(Decider, method, planted)
        pool = made_pool("p", "a", "b", models=("a", "b"), placement=PlacementSettings(memory=1 << 30))
        members = Members(Switch(broken=False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "ModelPlacement", Decider)
            made = PoolPlacement(pool, PoolTable([pool]).held, members, HealthChecks([pool], members))
        assert pool.model_demand is not None
        for each in ("a", "b"):
            pool.model_demand.begin(each, 0)
            pool.obstacles[each] = "none has it", 0

        async def turn() -> None:
            for each in ("a", "b"):  # each turn has news of each
                pool.set_ready(each, True, ("a", "b"), MemberIndex(frozenset("ab"), frozenset(each)))
                pool.set_ready(each, True, ("a", "b"), MemberIndex(frozenset("ab"), frozenset()))
                pool.obstacles[each] = "none has it", 0
            running = asyncio.create_task(made.run())
            await asyncio.sleep(0.001)
            running.cancel()

        return Case(made.loop, turn, lambda: handled)

    make.__name__ = f"placement_{method}"
    return make


CASES = [
    health_checks,
    memory_pages,
    sizes_of_models,
    autoscaler,
    observers_of_the_autoscaler,
    *map(placing, ("set_member", "set_held", "set_model", "demand", "obstacle")),
]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_unit_that_fails_keeps_no_other_from_being_handled_and_heals(make: Callable[[Switch], Case]) -> None:
    async def main() -> None:
        switch = Switch()
        case = make(switch)
        async with asyncio.timeout(60):
            await case.turn()
            assert case.done() == {"b"}
            assert case.loop.failing and all("incident" in text for text in case.loop.failing.values())
            switch.broken = False
            while "a" not in case.done():  # after its rest
                await case.turn()
                await asyncio.sleep(0.05)
        assert not case.loop.failing and not case.loop.dead_letters

    asyncio.run(main())


# Rollouts.


def test_a_member_that_fails_keeps_no_other_from_its_order() -> None:
    world, switch = RolloutWorld(), Switch()
    made, ask = world.router(when_lost=WhenLost.GO_ON), world.members.ask

    async def asked(member: Member, *rest: Any, **more: Any) -> MemberAnswer:
        switch(member.name)
        return await ask(member, *rest, **more)

    world.members.ask = asked  # type: ignore[method-assign]
    before = internal_errors.counts["router"]
    for _ in range(3):
        asyncio.run(made.step())
    assert [state for state, _ in world.states][1] == "running"
    assert internal_errors.counts["router"] > before
    switch.broken = False
    asyncio.run(made.step())
    assert [state for state, _ in world.states] == ["running", "running"]


def test_a_rollout_that_fails_is_set_aside_and_aborted_when_it_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight stays until then: members get no order."""
    monkeypatch.setattr(pool_rollouts, "INTERVAL", 0.01)
    world = RolloutWorld()
    made = world.router()

    async def main() -> None:
        await made.step()
        await made.step()
        before = world.states
        decide = FleetRollout.decide
        monkeypatch.setattr(FleetRollout, "decide", fails)
        running = asyncio.create_task(made.run())
        async with asyncio.timeout(10):
            while not made.loop.dead_letters:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert made.loop.waiting == 0 and world.states == before
            (letter,) = made.loop.dead_letters
            assert letter.unit == "m"
            monkeypatch.setattr(FleetRollout, "decide", decide)
            made.loop.discard("m")
            while world.states != [("aborted", 0), ("aborted", 0)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(main())


# Discovery.


def fails(*_: object, **__: object) -> Any:
    raise Fault


class Taking:
    """Takes members, and fails until it is mended."""

    def __init__(self) -> None:
        self.broken = True
        self.taken: list[tuple[str, ...]] = []

    def __call__(self, members: Sequence[Member]) -> None:
        if self.broken:
            raise Fault
        self.taken.append(tuple(member.name for member in members))


def test_members_of_a_name_that_could_not_be_taken_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RESOLVE_SECONDS", 0.01)
    take = Taking()

    async def main() -> None:
        found = Discovery(PoolSettings("p", MemberSource(dns="localhost:80")), take)
        running = asyncio.create_task(found.run())
        async with asyncio.timeout(10):
            while not found.loop.failing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            take.broken = False
            while not take.taken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not found.loop.failing
        running.cancel()

    asyncio.run(main())


def test_members_of_a_file_that_could_not_be_taken_are_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("a:80\n")
    take = Taking()
    take.broken = False

    async def main() -> None:
        found = Discovery(PoolSettings("p", MemberSource(file=str(file))), take)
        await found.start()
        take.broken = True
        running = asyncio.create_task(found.run())
        file.write_text("b:80\n")
        async with asyncio.timeout(30):
            while not found.loop.failing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            take.broken = False
            while found.loop.failing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert take.taken == [("a:80",), ("b:80",)]
        running.cancel()

    asyncio.run(main())


def test_members_in_ray_that_could_not_be_taken_are_taken_with_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    take = Taking()
    found = RayMembers(PoolSettings("p", MemberSource(ray="r/p")), take)
    for _ in range(2):
        with pytest.raises(Fault):
            found.read(b'{"members": ["a:80"]}')
    take.broken = False
    found.read(b'{"members": ["a:80"]}')
    found.read(b'{"members": ["a:80"]}')
    assert take.taken == [("a:80",)]


# Progress.


def test_a_check_that_never_ends_is_a_stall_and_members_that_do_not_answer_are_none() -> None:
    """The watch of the loop of health checks, which decides whether the router is ready."""

    class Silent(HttpMembers):
        async def ask(self, *_: Any, **__: Any) -> MemberAnswer:
            return MemberAnswer(0, problem="did not answer within 2 s")

    async def main() -> None:
        pool = made_pool("p", "a", "b")
        checks = HealthChecks([pool], Silent(1.0))
        (work, _) = checks.works()
        assert work.loop.essential
        await checks.check_all()
        work.loop.watch()
        assert not work.loop.problem and not work.loop.failing and not pool.ready

    asyncio.run(main())


# Timers.


def test_a_wait_that_is_over_is_told_whatever_fails_and_others_end_in_time() -> None:
    async def main() -> None:
        pool = made_pool("p", models=(), hold_requests=10, hold_timeout=0.05)
        held, ended = PoolTable([pool]).held, list[NeriteError]()
        for _ in range(3):
            held.hold(pool, "m", 0, cast(Any, SimpleNamespace(give_up=ended.append)))
        pool.obstacle_to = fails  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            while len(ended) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all("incident" in error.message for error in ended) and not pool.held

    asyncio.run(main())


def test_a_model_that_fails_keeps_no_other_from_being_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has a controller of its own; one timer serves them all."""
    due = AdmissionController.due

    def planted(self: AdmissionController, now_ns: int) -> Any:
        if self.model == "a":
            raise Fault
        return due(self, now_ns)

    monkeypatch.setattr(AdmissionController, "due", planted)

    async def main() -> None:
        policy = parse_policy("[llms.a]\nmax_sequences = 1\n[llms.b]\nmax_sequences = 1\n")
        gate = RouterAdmission(policy, asyncio.get_running_loop())
        admitted: list[str] = []

        def submit(model: str) -> Admission:
            exchange = SimpleNamespace(admitted=lambda level, order: admitted.append(model), rejected=print)
            made = gate.submit(AdmissionRequest(Caller("t"), model, True, 1), cast(Any, exchange))
            if not made.offer():
                gate.hold(made)
            return made

        running = [submit(model) for model in ("a", "b")]
        for model in ("a", "b"):
            submit(model)
        assert admitted == ["a", "b"] and gate.waiting == 2
        for each in running:
            each.ended(TicketEnding.COMPLETE)
        async with asyncio.timeout(10):
            while admitted != ["a", "b", "b"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())
