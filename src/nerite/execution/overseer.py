"""Looks after what workers execute: of one that is at it for very long, the log says where its threads are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final
from weakref import WeakKeyDictionary

from nerite.execution.runner import Runner
from nerite.execution.worker_runner import WorkerRunner
from nerite.scheduling.execution_watch import ExecutionWatch

LONG: Final = 60
"""How many times as long as the event loop may stand still, an execution may last."""
_LOOKS: Final = 4
"""Within that time."""


class Overseer:
    """Over the workers of a server. What it costs has nothing to do with how many requests there are."""

    def __init__(self, runners: Callable[[], Iterable[Runner]], stall_seconds: float) -> None:
        """``runners`` returns the instances that there are now; ``stall_seconds`` is the flag."""
        self._runners = runners
        self._limit = stall_seconds * LONG
        self._watches: WeakKeyDictionary[WorkerRunner, ExecutionWatch] = WeakKeyDictionary()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limit / _LOOKS)
            for runner in self._runners():
                if isinstance(runner, WorkerRunner):
                    self._look(runner, loop.time())

    def _look(self, runner: WorkerRunner, now: float) -> None:
        watch = self._watches.get(runner)
        if watch is None:
            watch = self._watches[runner] = ExecutionWatch(self._limit)
        seconds = watch.look(runner.executes, now)
        if seconds is not None:
            runner.tell_where_it_is(seconds)
