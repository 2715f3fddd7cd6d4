"""The number of replicas of a workload: written to its subresource ``scale``, as ``kubectl scale`` does."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from nerite.cluster.kubernetes_names import ScaleTarget
from nerite.core.errors import Unavailable
from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.kubernetes.api_client import ApiClient
from nerite.observability.log import log
from nerite.scheduling.backoff import ExponentialBackoff, jittered

_FIRST_DELAY: Final = 0.5
_LONGEST_DELAY: Final = 30.0
_CHECK_SECONDS: Final = 30.0
"""Time after which the number is compared again: somebody else may have changed it."""


async def replicas_of(client: ApiClient, target: ScaleTarget) -> int:
    """Return the number of replicas that a workload should have. Raises ``NeriteError``."""
    scale = await client.get(target.scale_path(client.access.namespace))
    spec = scale.get("spec")
    count = spec.get("replicas", 0) if isinstance(spec, dict) else None
    if not isinstance(count, int):
        raise Unavailable(f"the API server says no number of replicas of {target}")
    return count


async def set_replicas(client: ApiClient, target: ScaleTarget, count: int) -> None:
    """Have a workload scaled. Raises ``NeriteError``."""
    await client.patch(target.scale_path(client.access.namespace), {"spec": {"replicas": count}})


class ReplicaActuator:
    """Has a workload scaled to the number of members that is wanted last, again and again until it is so."""

    def __init__(self, client: ApiClient, target: ScaleTarget) -> None:
        self._client = client
        self.target = target
        self._wanted: int | None = None
        self.loop = WorkLoop(
            "autoscaling",
            str(target),
            waiting=lambda: 0 if self._wanted is None else 1,
            stall_seconds=STALL_SECONDS + 3 * _CHECK_SECONDS,
        )
        self._changed = asyncio.Event()

    def want(self, count: int) -> None:
        """Want so many replicas; ``run`` sees to it."""
        if count != self._wanted:
            self._wanted = count
            self._changed.set()

    async def run(self) -> None:
        """Scale the workload as wanted until it is cancelled. What fails is retried; only the last number counts."""
        backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY, at_once=False)
        while True:
            delay = _CHECK_SECONDS
            self._changed.clear()
            if self._wanted is not None:
                delay = jittered(backoff.failed(monotonic()))
                with self.loop.step("replicas"):
                    await self._apply(self._wanted)
                    backoff.succeeded()
                    delay = _CHECK_SECONDS
            await self._wait(delay)

    async def _apply(self, wanted: int) -> None:
        before = await replicas_of(self._client, self.target)
        if before != wanted:
            await set_replicas(self._client, self.target, wanted)
            log.info(f"{self.target} is scaled from {before} to {wanted} replicas")

    async def _wait(self, seconds: float) -> None:
        """Wait until another number is wanted, or the time has passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
