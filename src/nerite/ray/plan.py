"""What a cluster file needs in Ray: servers with their resources, and the router. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from nerite.cluster.settings import ClusterSettings, PoolSettings, ServerResources
from nerite.core.errors import InvalidArgument
from nerite.core.sizes import size_text
from nerite.tools.up.local_plan import rollout_lines

CONTROLLER: Final = "controller"
ROUTER: Final = "router"
"""Names of actors; those of servers are ``POOL/NUMBER``."""
_SMALLEST: Final = 0.001
"""Processors of a server that asks for nothing: a placement group reserves something."""


def pool_of(name: str) -> str:
    """Return the pool of the server whose actor has this name."""
    return name.rpartition("/")[0]


def namespace_of(name: str) -> str:
    """Return the namespace of Ray in which everything of a cluster has its name."""
    return f"nerite-{name}"


class PoolPlan(NamedTuple):
    """The servers of one pool."""

    pool: PoolSettings
    bundle: Mapping[str, float]
    """Resources of the placement group of each server, by Ray's names."""
    digest: str
    """Differs where servers that run have to be replaced."""

    @property
    def engine_places_gpus(self) -> bool:
        """Whether the engine asks Ray for GPUs, and not the server."""
        return self.pool.resources is not None and self.pool.resources.engine_places_gpus

    @property
    def least(self) -> int:
        """Number of members to begin with."""
        return self.pool.source.replicas if self.pool.scaling is None else self.pool.scaling.least

    @property
    def warm(self) -> int:
        """Number of servers that stand by."""
        return 0 if self.pool.scaling is None else self.pool.scaling.warm


@dataclass(frozen=True, slots=True)
class RayPlan:
    """Everything that ``nerite ray up`` has made."""

    name: str
    settings: ClusterSettings
    pools: tuple[PoolPlan, ...]
    router_node: str = ""
    """Id of the node on which the router runs; empty: there is none."""

    @property
    def digest(self) -> str:
        """Differs between plans that differ."""
        return _digest(self.name, self.settings, self.router_node)

    @property
    def router_digest(self) -> str:
        """Differs where the router has to be started anew."""
        return _digest(self.settings, self.router_node)


def ray_plan(settings: ClusterSettings, name: str, router_node: str = "") -> RayPlan:
    """Return the plan. Raises ``InvalidArgument`` for a file that has nothing to start."""
    pools = tuple(
        PoolPlan(pool, _bundle(pool.resources), _digest(pool.source.models, pool.source.flags, pool.resources))
        for pool in settings.pools
        if pool.source.models
    )
    if not pools:
        raise InvalidArgument(
            f"{settings.path}: no pool has models, so there is nothing to start in Ray. Give one models = DIRECTORY, "
            "or use nerite route, which only routes to servers that run"
        )
    for key, port in (("http-port", settings.router.http_port), ("metrics-port", settings.router.metrics_port)):
        if not port:
            raise InvalidArgument(f"{settings.path}: router.{key} is 0, any free port: choose one")
    return RayPlan(name, settings, pools, router_node)


def _bundle(resources: ServerResources | None) -> dict[str, float]:
    asked = ServerResources() if resources is None else resources
    named = {"CPU": asked.cpus, "GPU": asked.gpus, "memory": float(asked.memory), **asked.custom}
    return {name: amount for name, amount in named.items() if amount} or {"CPU": _SMALLEST}


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def plan_text(plan: RayPlan) -> str:
    """Return the plan for people: a line for each pool, one for the router, and one for each rollout."""
    lines = [(each.pool.name, _pool_text(each)) for each in plan.pools]
    router = plan.settings.router
    lines.append((ROUTER, f"nerite route on this node, HTTP on {router.address}:{router.http_port}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:{width}}  {text}" for name, text in lines), *rollout_lines(plan.settings)])


def _pool_text(plan: PoolPlan) -> str:
    source, scaling = plan.pool.source, plan.pool.scaling
    count = str(source.replicas) if scaling is None else f"{scaling.least} to {scaling.most}"
    asked = ", ".join(
        size_text(int(amount)) if name == "memory" else f"{amount:g} {name}" for name, amount in plan.bundle.items()
    )
    engine = ", GPUs by the engine" if plan.engine_places_gpus else ""
    return f"{count} x nerite {' '.join(('serve', source.models, *source.flags))}  ({asked}{engine} each)"
