"""Which members hold which models, carried out: looks at demand and members, and has members load and unload models.

``ModelPlacement`` decides. What a member holds is learned from its repository index, never assumed from an order, so
that an order that is lost or given twice does no harm: to load what is loaded changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Final, NamedTuple
from urllib.parse import quote

from nerite.balancing.member import Member
from nerite.balancing.member_load import MemberLoad
from nerite.balancing.model_placement import ModelPlacement, PlacementAction, PlacementStep
from nerite.cluster.settings import PlacedModel, PlacementSettings
from nerite.core.text import quoted_text
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log
from nerite.router.health import HealthChecks
from nerite.router.held_requests import HeldRequests
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.member_memory import MemoryReports
from nerite.router.placement_lease import PlacementLease
from nerite.router.pools import MemberIndex, RouterPool

_INTERVAL: Final = 1.0
"""Seconds between two decisions."""
_SHORTEST: Final = 0.05
"""Seconds between two decisions when a request waits for a model that nobody has."""
_ORDERS: Final = 16
"""Orders at the same time, of one pool."""
_IDLE_TIMES: Final = 20
"""Multiple of ``rise`` after which the demand for a model that had none is certainly next to nothing."""
_OBSTACLE_NS: Final = 30_000_000_000
"""For so long requests are refused for a model that no member has the memory for, before it is looked at again."""
_NOTHING: Final = PlacedModel()


class CopyFigures(NamedTuple):
    """Copies of a model in a pool."""

    copies: int
    wanted: int


class PoolPlacement:
    """Places the models of one pool."""

    def __init__(
        self,
        pool: RouterPool,
        held: HeldRequests,
        members: HttpMembers,
        health: HealthChecks,
        lease: PlacementLease | None = None,
    ) -> None:
        """Without ``lease`` there is no other router, as far as this one knows."""
        assert pool.settings.placement is not None
        self.pool = pool
        self.loop = WorkLoop("placement", f"pool '{pool.name}'")
        self.steps: Counter[tuple[str, str]] = Counter()
        """Orders by step, and by how they ended: ``done``, ``failed`` or ``lost``."""
        self._settings: PlacementSettings = pool.settings.placement
        self._held = held
        self._members = members
        self._health = health
        self._lease = lease
        self._placement = ModelPlacement(self._settings.policy)
        self._reports = MemoryReports(pool, members, self._forget_sizes)
        self._wake = asyncio.Event()
        self._limit = asyncio.Semaphore(_ORDERS)
        self._orders: dict[asyncio.Task[None], PlacementAction] = {}
        """What members are told to do now."""
        self._seen: dict[str, MemberIndex | None] = {}
        """Members, and the index of each that the decider knows."""
        self._described: frozenset[str] = frozenset()
        """Models that the decider knows."""
        self._active: dict[str, int] = {}
        """Models with demand, and when it was last seen."""
        self._reasons: dict[str, str] = {}
        """Why the last load of a model has failed."""
        pool.on_hold = self._hold_began

    # For the metrics.

    def figures(self) -> Iterator[tuple[str, CopyFigures]]:
        """Yield the figures of each model that has copies or should have some."""
        for model in sorted(self._described):
            figures = CopyFigures(self._placement.copies(model), self._placement.copies_wanted(model))
            if any(figures):
                yield model, figures

    # The loop.

    async def run(self) -> None:
        """Decide repeatedly, until it is cancelled."""
        try:
            while True:
                with self.loop.step("models"):
                    self._look(monotonic_ns())
                await asyncio.sleep(_SHORTEST)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL - _SHORTEST):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._orders:
                task.cancel()

    @property
    def reports(self) -> MemoryReports:
        """What members report about their memory."""
        return self._reports

    def _hold_began(self, model: str) -> None:
        if not any(action.step is PlacementStep.LOAD and action.model == model for action in self._orders.values()):
            self._wake.set()

    def _look(self, now: int) -> None:
        """Take what has changed, and begin what follows from it."""
        self._see_members(now)
        waiting = self._see_demand(now)
        leads = self._lease is None or self._lease.leads(now)
        for action in self._placement.decide(now) if leads else ():
            task = asyncio.get_running_loop().create_task(self._carry_out(action))
            self._orders[task] = action
            task.add_done_callback(self._orders.pop)
        for model in {*waiting, *self.pool.obstacles}:
            waits = model in waiting and model in self._described
            self._attempt("obstacle to", model, partial(self._see_obstacle, model, now, waits=waits))

    def _attempt(self, what: str, name: str, step: Callable[[], None]) -> bool:
        """Do what concerns one model or member, unless it rests after a failure; return whether it was done."""
        unit = f"{what} '{quoted_text(name)}'"
        if self.loop.admits(unit):
            with self.loop.step(unit):
                step()
                return True
        return False

    def _see_members(self, now: int) -> None:
        pool, placement = self.pool, self._placement
        loads = {load.member.name: load for load in pool.balancer.members}
        for name in [name for name in self._seen if name not in loads]:
            placement.remove_member(name)
            del self._seen[name]
        for name, load in loads.items():
            self._attempt("member", name, partial(self._see_member, name, load))
        if pool.known != self._described:
            self._describe(pool.known)
        for name, index in pool.indexes.items():
            if index is not self._seen.get(name):
                self._attempt("index of", name, partial(self._see_index, name, index, now))

    def _see_member(self, name: str, load: MemberLoad) -> None:
        memory = load.member.memory or self._reports.total(name) or self._settings.memory
        self._placement.set_member(name, memory, load.ready and not load.draining)
        self._seen.setdefault(name, None)

    def _see_index(self, name: str, index: MemberIndex, now: int) -> None:
        self._placement.set_held(name, index.held, now)
        self._seen[name] = index

    def _describe(self, known: frozenset[str]) -> None:
        """Tell the decider which models there are. Those that fail are told again later."""
        measured = self._reports.of_models()
        tell = partial(self._describe_model, measured)
        gone = {each for each in self._described - known if self._attempt("end of", each, partial(self._drop, each))}
        told = {each for each in known if self._attempt("model", each, partial(tell, each))}
        self._described = frozenset((self._described - gone) | told)
        self._seen = dict.fromkeys(self._seen)  # because copies of models that are new to it have to be told again

    def _drop(self, model: str) -> None:
        self._placement.remove_model(model)
        self._reasons.pop(model, None)
        self.pool.obstacles.pop(model, None)

    def _describe_model(self, measured: Mapping[str, int], model: str) -> None:
        settings = self._settings
        own = settings.models.get(model, _NOTHING)
        self._placement.set_model(
            model,
            measured.get(model) if own.memory is None else own.memory,
            settings.least if own.least is None else own.least,
            settings.most if own.most is None else own.most,
        )

    def _forget_sizes(self) -> None:
        """Have the models described anew: members have measured them."""
        self._describe(self._described)

    def _see_demand(self, now: int) -> Counter[str]:
        """Take the demand; return how many requests wait for each model."""
        demand, placement = self.pool.model_demand, self._placement
        assert demand is not None
        averages = demand.take(now)
        waiting = self._held.queue.counts(self.pool.name)
        for model, count in waiting.items():
            averages[model] = max(averages.get(model, 0.0), count)
        if self._lease is not None:
            self._lease.exchange(averages, now)
            for model, average in self._lease.others.items():
                averages[model] = averages.get(model, 0.0) + average
        for model, average in averages.items():
            if model not in self._described:
                continue
            self._attempt("demand for", model, partial(self._see_model_demand, model, average, now))
        for model, seen in list(self._active.items()):
            if seen != now:
                placement.demand(model, 0.0, now)
                if now - seen > _IDLE_TIMES * self._settings.policy.rise * 1e9:
                    del self._active[model]
        return waiting

    def _see_model_demand(self, model: str, average: float, now: int) -> None:
        if model not in self._active:
            self._placement.demand(model, 0.0, now)  # so that the time without demand does not count as time with it
        self._placement.demand(model, average, now)
        self._active[model] = now

    def _see_obstacle(self, model: str, now: int, *, waits: bool) -> None:
        """Tell requests for a model whether it is worth to wait for it."""
        pool, found = self.pool, self._placement.obstacle(model, now)
        leads = pool.ready and (self._lease is None or self._lease.leads(now))
        if found is not None:
            reason = self._reasons.get(model, "") if found.until_ns else ""
            text = f"{found.text} ({reason})" if reason else found.text
            pool.obstacles[model] = text, found.until_ns or now + _OBSTACLE_NS
            self._held.fail(pool, model)
        elif waits and leads and not self._placement.copies(model):
            pool.obstacles[model] = "members have no room for it beside models that are in use or were just loaded", 0
        else:
            pool.obstacles.pop(model, None)

    # Orders.

    async def _carry_out(self, action: PlacementAction) -> None:
        """Have a member load or unload a model, and learn what it holds then."""
        step, name, model, reason = action
        pool = self.pool
        unit = f"{step} of model '{quoted_text(model)}' at member '{name}'"
        if not self.loop.admits(unit):
            self._placement.order_lost(name, model)
            return
        what = f"Pool '{pool.name}': member '{name}'"
        member = next((load.member for load in pool.balancer.members if load.member.name == name), None)
        outcome = "lost"
        with self.loop.step(unit):
            if member is not None:
                log.info(f"{what} is to {step} model '{quoted_text(model)}': {reason}")
                began = monotonic_ns()
                answer = await self._order(member, step, model)
                outcome = self._outcome(action, answer)
                if outcome == "done":
                    seconds = (monotonic_ns() - began) / 1e9
                    log.info(f"{what} has {step}ed model '{quoted_text(model)}' in {seconds:.3g} s")
                else:
                    log.warning(f"{what} did not {step} model '{quoted_text(model)}': {answer.failure}")
        if outcome == "lost":
            self._placement.order_lost(name, model)
        self.steps[str(step), outcome] += 1
        self._wake.set()

    async def _order(self, member: Member, step: PlacementStep, model: str) -> MemberAnswer:
        """Give an order, and learn what the member holds after it. Requests keep off a copy that is unloaded."""
        pool = self.pool
        try:
            if step is PlacementStep.UNLOAD:
                pool.withhold(member.name, model)
            async with self._limit:
                answer = await self._ask(member, step, model)
                if step is PlacementStep.LOAD and answer.status not in (0, 200):
                    # A server with a model that has failed is not ready, until that is unloaded.
                    await self._ask(member, PlacementStep.UNLOAD, model)
        finally:
            pool.give_back(member.name, model)
        await self._health.check(pool, member)
        self._see_members(monotonic_ns())
        return answer

    async def _ask(self, member: Member, step: PlacementStep, model: str) -> MemberAnswer:
        path = f"/v2/repository/models/{quote(model, safe='')}/{step}"
        seconds = self._settings.policy.patience
        return await self._members.ask(member, "POST", path, b"{}", seconds, self._members.key_of(self.pool))

    def _outcome(self, action: PlacementAction, answer: MemberAnswer) -> str:
        """Tell the decider how an order ended; return that as a word for the metrics."""
        step, name, model, _ = action
        now = monotonic_ns()
        loads = step is PlacementStep.LOAD
        if answer.status == 200:
            if loads:
                self._reasons.pop(model, None)
                self._placement.order_lost(name, model)  # no effect if the index has it, as it should
            return "done"
        ready = any(load.ready for load in self.pool.balancer.members if load.member.name == name)
        if answer.problem and not ready:
            return "lost"
        if loads:
            self._reasons[model] = f"member '{name}' {answer.failure}"
            self._placement.load_failed(name, model, now)
        else:
            self._placement.unload_failed(name, model, now)
        return "failed"
