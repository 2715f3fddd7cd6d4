"""Whether instances can serve: asked of each, answered at once or from the last answer, and joined to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

Answered: TypeAlias = Callable[[bool], None]

PROBE_PATIENCE: Final = 0.1
"""Seconds that a probe waits for a model's own check; then the last answer counts."""
CHECK_PATIENCE: Final = 5.0
"""Seconds that a model has for its own check while it executes nothing; then it is not ready."""


class ReadinessCheck:
    """A model's own check of whether it can serve, in a worker that may be busy. For the loop's thread only.

    Checks that overlap are one check: who asks while one is under way gets its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[Answered], None]) -> None:
        """``ask`` sends the question; it is answered in time, late, or never."""
        self._loop = loop
        self._ask = ask
        self._ready = False
        self._asked_at: float | None = None
        """When the question was sent that is not answered yet."""
        self._waiting: list[Answered] = []

    def check(self, answered: Answered, patience: float, *, executing: bool) -> None:
        """Answer within ``patience`` seconds: with the last answer if there is no new one by then.

        While the instance is ``executing`` the last answer counts, as the model's code is not called a second time.
        """
        if executing:
            answered(self._ready)
            return
        now = self._loop.time()
        if self._asked_at is None:
            self._asked_at = now
            self._waiting.append(answered)
            self._ask(self._answer)
        elif now - self._asked_at > CHECK_PATIENCE:
            self._ready = False
            answered(False)
            return
        else:
            self._waiting.append(answered)
        if answered in self._waiting:
            self._loop.call_later(patience, self._late, answered)

    def refresh(self) -> None:
        """Ask, so that there is an answer by the time of the first probe."""
        self.check(_ignored, CHECK_PATIENCE, executing=False)

    def lost(self) -> None:
        """Answer all who wait with no: the worker is gone, and the question with it."""
        self._answer(False)

    def _answer(self, ready: bool) -> None:
        self._ready, self._asked_at = ready, None
        waiting, self._waiting = self._waiting, []
        for answered in waiting:
            answered(ready)

    def _late(self, answered: Answered) -> None:
        if answered in self._waiting:
            self._waiting.remove(answered)
            answered(self._ready)


def _ignored(_ready: bool) -> None:
    """Do nothing: the answer is kept."""


def ask_all(asked: Collection[Callable[[Answered], None]], answered: Answered) -> None:
    """Ask them side by side, and answer once, when the last has: True if all can, or if there are none."""
    waiting = len(asked)
    ready = True

    def one(answer: bool) -> None:
        nonlocal waiting, ready
        waiting -= 1
        ready = ready and answer
        if waiting == 0:
            answered(ready)

    if not asked:
        answered(True)
    for ask in asked:
        ask(one)
