"""What members say of memory on their metrics pages: how much they have, and how much their models take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from nerite.balancing.member import Member
from nerite.core.work_loop import WorkLoop
from nerite.router.http_members import HttpMembers
from nerite.router.pools import RouterPool

_INTERVAL: Final = 15.0
"""Seconds between two readings of a page."""
_SECONDS: Final = 5.0
_FOR_MODELS: Final = 0.8
"""Share of a member's memory that models may take; the rest is for requests and for other programs."""
_MOST: Final = 2.0**60
"""More bytes than any member has. What a page says beyond that, infinity included, counts as this much."""
_SAMPLE: Final = re.compile(
    rb"^(nv_[gc]pu_memory_total_bytes|nerite_model_memory_bytes)(?:\{([^}\n]*)\})? ([0-9.eE+]+)$", re.M
)
_MODEL: Final = re.compile(rb'(?:^|,)model="((?:[^"\\]|\\.)*)"')


class MemoryFigures(NamedTuple):
    """What a metrics page says."""

    total: int
    """Bytes for models: of the GPUs if there are any; 0: not told."""
    models: dict[str, int]
    """Bytes of models that are measured. A model that runs in the server's own process is not."""


def memory_figures(page: bytes) -> MemoryFigures:
    """Return the figures of a metrics page, of Nerite or Triton."""
    totals = {b"nv_gpu_memory_total_bytes": 0.0, b"nv_cpu_memory_total_bytes": 0.0}
    models: dict[str, int] = {}
    for name, labels, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:  # such as 1e+
            continue
        if name in totals:
            totals[name] += value
        elif (model := _MODEL.search(labels)) and value:
            key = model[1].decode(errors="replace")
            models[key] = models.get(key, 0) + int(min(value, _MOST))
    gpu, cpu = totals.values()
    return MemoryFigures(int(_FOR_MODELS * min(gpu or cpu, _MOST)), models)


class MemoryReports:
    """Reads the metrics pages of a pool's members, of those whose address is known."""

    def __init__(self, pool: RouterPool, members: HttpMembers, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._members = members
        self._changed = changed
        self.loop = WorkLoop("placement", f"memory of the members of pool '{pool.name}'")
        self._figures: dict[str, MemoryFigures] = {}
        """By member."""

    def total(self, member: str) -> int:
        """Return the bytes that a member has for models; 0: not known."""
        figures = self._figures.get(member)
        return figures.total if figures else 0

    def of_models(self) -> dict[str, int]:
        """Return the bytes of each model that is measured, where it takes the most."""
        most: dict[str, int] = {}
        for figures in self._figures.values():
            for model, size in figures.models.items():
                most[model] = max(most.get(model, 0), size)
        return most

    async def run(self) -> None:
        """Read the pages repeatedly, until it is cancelled."""
        while True:
            await self.read_all()
            await asyncio.sleep(_INTERVAL)

    async def read_all(self) -> None:
        """Read the page of each member that is ready. One that fails keeps its last figures."""
        members = [load.member for load in self._pool.balancer.members if load.ready and load.member.metrics]
        await asyncio.gather(*(self._read(member) for member in members))
        known = {load.member.name for load in self._pool.balancer.members}
        for name in self._figures.keys() - known:
            del self._figures[name]
            self.loop.forget(f"member '{name}'")
        with self.loop.step("sizes of models"):
            self._changed()

    async def _read(self, member: Member) -> None:
        with self.loop.step(f"member '{member.name}'"):
            await self._read_page(member)

    async def _read_page(self, member: Member) -> None:
        page = member._replace(name=f"{member.name} (metrics)", http=member.metrics)
        answer = await self._members.ask(page, "GET", "/metrics", seconds=_SECONDS)
        if answer.status == 200:
            self._figures[member.name] = memory_figures(answer.body)
