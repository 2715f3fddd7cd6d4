"""Autoscaling at the router: tells the decider of each pool what happened, and reports what is wanted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nerite.autoscaling.policy import ScalingPolicy
from nerite.autoscaling.scaler import PoolScaler
from nerite.core.work_loop import WorkLoop
from nerite.router.pools import RouterPool

_INTERVAL: Final = 1.0


class ScaledPool:
    """A pool with its autoscaler."""

    def __init__(self, pool: RouterPool, policy: ScalingPolicy) -> None:
        self.pool = pool
        self.scaler = PoolScaler(policy)

    @property
    def wanted(self) -> int:
        """Members that the pool should have."""
        return self.scaler.decision.wanted

    @property
    def wakes(self) -> bool:
        """Whether a request waits, or was turned away, that needs a member of an empty pool."""
        demand = self.pool.demand
        return not self.wanted and demand is not None and bool(self.pool.held or demand.turned_away)

    def observe(self, seconds: float, now: float) -> bool:
        """Decide by what happened in the last seconds; return whether another number of members is wanted."""
        pool, before = self.pool, self.wanted
        assert pool.demand is not None
        ready = sum(1 for _ in pool.ready_members)
        figures = pool.demand.take(seconds, under_way=pool.under_way, held=pool.held, ready=ready)
        return self.scaler.observe(figures, now).wanted != before

    def report(self) -> dict[str, Any]:
        """Return what is wanted and why, as in ``GET /v2/pools``."""
        scaler = self.scaler
        return {
            "wanted": self.wanted,
            "reason": scaler.decision.reason,
            "min": scaler.policy.least,
            "max": scaler.policy.most,
            "warm": scaler.policy.warm,
            "demand": round(scaler.demand.rate, 3),
            "member_rate": round(scaler.rate, 3),
            "late_share": round(scaler.member_rate.late_share, 4),
            "start_seconds": round(scaler.start_times.seconds, 1),
        }


class RouterScaling:
    """The autoscalers of all pools that have one."""

    def __init__(self, pools: Sequence[RouterPool]) -> None:
        self._pools = pools
        self.loop = WorkLoop("autoscaling")
        self.scaled: Mapping[str, ScaledPool] = {
            pool.name: ScaledPool(pool, pool.settings.scaling) for pool in pools if pool.settings.scaling is not None
        }
        """By name."""
        self._observers: dict[Callable[[ScaledPool], None], str] = {}
        """Each with its name as a unit of the loop."""
        self._observed = 0
        self._untold: dict[Callable[[ScaledPool], None], set[ScaledPool]] = {}
        """Changes that an observer could not be told of."""

    def observe(self, changed: Callable[[ScaledPool], None]) -> None:
        """Have a function called whenever another number of members is wanted for a pool."""
        self._observed += 1
        self._observers[changed] = f"observer {self._observed}"

    def forget(self, changed: Callable[[ScaledPool], None]) -> None:
        """Call a function no more."""
        self.loop.forget(self._observers.pop(changed, ""))
        self._untold.pop(changed, None)

    def tell(self, scaled: ScaledPool) -> None:
        """Call the functions that are to know of a change."""
        for changed in tuple(self._observers):
            self._untold.setdefault(changed, set()).add(scaled)
        self._tell_rest()

    def _tell_rest(self) -> None:
        """Call functions that were not called yet, or have failed. One that fails keeps no other from being called."""
        for changed, pools in list(self._untold.items()):
            unit = self._observers[changed]
            for scaled in list(pools):
                if self.loop.admits(unit):
                    with self.loop.step(unit):
                        changed(scaled)
                        pools.discard(scaled)
            if not pools:
                self._untold.pop(changed, None)

    async def run(self) -> None:
        """Decide once a second, and at once when a request finds no member in an empty pool, until it is cancelled."""
        last = {name: time.monotonic() for name in self.scaled}
        while True:
            await asyncio.sleep(_INTERVAL / 10)
            for name, scaled in self.scaled.items():
                if self.loop.admits(unit := f"pool '{name}'"):
                    with self.loop.step(unit):
                        now = time.monotonic()
                        seconds = now - last[name]
                        if seconds >= _INTERVAL or scaled.wakes:
                            last[name] = now
                            if scaled.observe(seconds, now):
                                self.tell(scaled)
            self._tell_rest()
            self.loop.advanced()

    def report(self) -> dict[str, Any]:
        """Return all pools with their members and load: the answer to ``GET /v2/pools``."""
        return {"pools": [self._report(pool) for pool in self._pools]}

    def _report(self, pool: RouterPool) -> dict[str, Any]:
        members = [
            {
                "name": load.member.name,
                "http": load.member.http,
                "grpc": load.member.grpc,
                "ready": load.ready,
                "ejected": load.ejected,
                "requests": load.requests,
                "work": round(load.work, 1),
            }
            for load in pool.balancer.members
        ]
        scaled = self.scaled.get(pool.name)
        return {
            "name": pool.name,
            "members": members,
            "ready": sum(load.ready for load in pool.balancer.members),
            "under_way": pool.under_way,
            "held": pool.held,
            **({} if scaled is None else scaled.report()),
        }
