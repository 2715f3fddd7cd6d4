"""Pools that are workloads of Kubernetes: their replicas follow what the autoscaler wants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nerite.cluster.kubernetes_names import ScaleTarget
from nerite.cluster.settings import PoolSettings
from nerite.core.background import BackgroundWork
from nerite.kubernetes.access import find_access
from nerite.kubernetes.api_client import ApiClient
from nerite.kubernetes.replicas import ReplicaActuator
from nerite.router.scaling import RouterScaling, ScaledPool


class ReplicaScaling:
    """The actuators of all pools that have one."""

    def __init__(self, pools: Sequence[PoolSettings], scaling: RouterScaling) -> None:
        self._targets: Final[Mapping[str, ScaleTarget]] = {
            pool.name: pool.scale_target for pool in pools if pool.scale_target is not None
        }
        """By pool."""
        self._scaling = scaling
        self._actuators: dict[str, ReplicaActuator] = {}

    async def start(self) -> None:
        """Find the API server. Raises ``NeriteError`` if there is no access to one."""
        if not self._targets:
            return
        client = ApiClient(await asyncio.to_thread(find_access))
        self._actuators = {name: ReplicaActuator(client, target) for name, target in self._targets.items()}
        self._scaling.observe(self._changed)

    def background_work(self) -> Iterator[BackgroundWork]:
        """Yield what runs beside the requests once it was started."""
        for actuator in self._actuators.values():
            yield BackgroundWork(actuator.loop, actuator.run)

    def _changed(self, scaled: ScaledPool) -> None:
        if actuator := self._actuators.get(scaled.pool.name):
            actuator.want(scaled.wanted)
