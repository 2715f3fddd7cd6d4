"""One go at loading: each model at most once, however many ask for it, and nobody waits for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from nerite.repository.delivery import Delivery

Waits = dict[str, set[str]]
"""By name, which ensembles wait for which models, in all rounds that go on."""


class LoadingRound:
    """For the loop's thread."""

    def __init__(self, bring: Callable[[str, Delivery | None, LoadingRound], Awaitable[None]], waits: Waits) -> None:
        """``bring`` loads a model, and raises ``NeriteError``."""
        self._bring = bring
        self._waits = waits
        self._tasks: dict[str, asyncio.Future[None]] = {}
        self._circles: dict[str, str] = {}

    @property
    def names(self) -> Iterable[str]:
        """The models whose turn it was."""
        return self._tasks.keys()

    async def load(self, name: str, delivery: Delivery | None = None) -> None:
        """Load a model, or wait until it is loaded. Raises as ``bring`` does."""
        await self._task(name, delivery)

    def forget(self) -> None:
        """Drop what became of the loads: an error has frames that have this round."""
        self._tasks.clear()

    async def load_parts(self, ensemble: str, parts: Iterable[str]) -> None:
        """Load the models that an ensemble is put together from, side by side. Whether they are there shows later."""
        waits = self._waits[ensemble] = set()
        tasks = []
        for part in parts:
            way = self._way(part, ensemble)
            if way:
                for before, each in zip((ensemble, *way), way, strict=False):
                    self._circles[each] = before
            else:
                waits.add(part)
                tasks.append(self._task(part, None))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._waits.pop(ensemble, None)

    def circle(self, ensemble: str) -> str:
        """Return the last on the way on which an ensemble leads back to itself; empty if it does not."""
        return self._circles.get(ensemble, "")

    def _task(self, name: str, delivery: Delivery | None) -> asyncio.Future[None]:
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(self._bring(name, delivery, self))
        return self._tasks[name]

    def _way(self, start: str, end: str) -> list[str]:
        """Return how one waits for another: the models between, both included; nothing if it does not."""
        if start == end:
            return [start]
        for each in self._waits.get(start, ()):
            way = self._way(each, end)
            if way:
                return [start, *way]
        return []
