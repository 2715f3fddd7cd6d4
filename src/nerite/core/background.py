"""Work beside the requests, on an event loop: what fails is reported and started again, and its progress is watched.

An exception that nothing on the loop has caught becomes an incident, as in ``nerite.core.failures``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple

from nerite.core.failures import report
from nerite.core.work_loop import WorkLoop, WorkLoops

_WATCH_SECONDS: Final = 1.0


class BackgroundWork(NamedTuple):
    """Work that runs as long as the process does."""

    loop: WorkLoop
    """Its progress."""
    run: Callable[[], Coroutine[Any, Any, None]]


def start_background(works: Iterable[BackgroundWork], loops: WorkLoops) -> list[asyncio.Task[None]]:
    """Start each work as a task of the running loop, and watch their progress.

    Adds their loops to ``loops``. Returns the tasks, for their owner to cancel.
    """
    tasks = []
    loop = asyncio.get_running_loop()
    for work in works:
        loops.add(work.loop)
        tasks.append(loop.create_task(_keep_running(work)))
    tasks.append(loop.create_task(_watch(loops)))
    return tasks


async def _keep_running(work: BackgroundWork) -> None:
    """Run work until it returns, and start it again after an unforeseen exception."""
    while True:
        try:
            await work.run()
            return
        except Exception as error:
            report("loop", error, f"of {work.loop}")
            await asyncio.sleep(work.loop.restarted(error))


async def _watch(loops: WorkLoops) -> None:
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        loops.watch()


def report_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception that no callback or task has caught, as an incident: the exception handler of loops."""
    message = context.get("message", "")
    report("loop", context.get("exception") or RuntimeError(message), f"({message})")
