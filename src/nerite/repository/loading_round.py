"""Rounds of loads: which model is loaded for whom, so that none is loaded twice and none waits for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from nerite.repository.repositories import LoadOverrides

Waits = dict[str, set[str]]
"""Ensembles by name, with the models that they wait for, in all rounds in progress."""


class LoadingRound:
    """One round of loads: each model is loaded at most once, and no load waits for itself. For the loop's thread."""

    def __init__(
        self, bring: Callable[[str, LoadOverrides | None, LoadingRound], Awaitable[None]], waits: Waits
    ) -> None:
        """``bring`` loads a model, and raises ``NeriteError``."""
        self._bring = bring
        self._waits = waits
        self._tasks: dict[str, asyncio.Future[None]] = {}
        self._cycles: dict[str, str] = {}
        """Models on a cycle, each with the ensemble before it."""

    @property
    def names(self) -> Iterable[str]:
        """The models that this round has loaded or tried to load."""
        return self._tasks.keys()

    async def load(self, name: str, delivery: LoadOverrides | None = None) -> None:
        """Load a model, or wait for its load in this round. Raises as ``bring`` does."""
        await self._task(name, delivery)

    def forget(self) -> None:
        """Drop the results of the loads: the frames of an error refer to this round."""
        self._tasks.clear()

    async def load_parts(self, ensemble: str, parts: Iterable[str]) -> None:
        """Load the models of an ensemble's steps concurrently. Failures are not raised; the ensemble finds them later.

        Models whose load waits for the ensemble itself are left out, and the cycle is recorded.
        """
        waits = self._waits[ensemble] = set()
        tasks = []
        for part in parts:
            chain = self._wait_chain(part, ensemble)
            if chain:
                for before, each in zip((ensemble, *chain), chain, strict=False):
                    self._cycles[each] = before
            else:
                waits.add(part)
                tasks.append(self._task(part, None))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._waits.pop(ensemble, None)

    def circle(self, ensemble: str) -> str:
        """Return the last ensemble on the cycle through ``ensemble``; empty if it is not on a cycle."""
        return self._cycles.get(ensemble, "")

    def _task(self, name: str, delivery: LoadOverrides | None) -> asyncio.Future[None]:
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(self._bring(name, delivery, self))
        return self._tasks[name]

    def _wait_chain(self, start: str, end: str) -> list[str]:
        """Return the chain of models through which ``start`` waits for ``end``, both included; else nothing."""
        if start == end:
            return [start]
        for each in self._waits.get(start, ()):
            chain = self._wait_chain(each, end)
            if chain:
                return [start, *chain]
        return []
