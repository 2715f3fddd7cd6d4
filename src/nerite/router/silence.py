"""Ends requests whose member has accepted them and sends nothing: such a member would keep them forever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic_ns
from typing import Final

from nerite.core.work_loop import WorkLoop
from nerite.router.pools import RouterPool

_LOOKS: Final = 20
"""Looks at each request within the shortest idle timeout."""
_SHORTEST: Final = 0.05
_LONGEST: Final = 5.0
"""Seconds between two looks."""


class SilenceWatch:
    """Looks at all requests that are at members, a few times within the idle timeout of their pool."""

    def __init__(self, pools: Sequence[RouterPool]) -> None:
        self.loop = WorkLoop("stalls", "members")
        self._pools = [pool for pool in pools if pool.settings.idle_timeout]
        shortest = min((pool.settings.idle_timeout for pool in self._pools), default=_LONGEST)
        self._seconds = min(max(shortest / _LOOKS, _SHORTEST), _LONGEST)

    async def run(self) -> None:
        """Look repeatedly, until it is cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            self.look(monotonic_ns())

    def look(self, now_ns: int) -> None:
        """End the requests whose member has been silent for too long."""
        for pool in self._pools:
            for exchange in list(pool.exchanges):
                with self.loop.step(f"requests of pool '{pool.name}'"):
                    exchange.end_if_silent(now_ns)
        self.loop.advanced()
