"""Work beside the requests, on an event loop: what fails is reported and started again.

An exception that nothing on the loop has caught becomes an incident, as in ``nerite.core.failures``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeAlias

from nerite.core.failures import report

BackgroundWork: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Starts work that runs as long as the process does."""

_RESTART_DELAY: Final = 1.0
"""Seconds before work that failed is started again."""


def start_background(works: Iterable[BackgroundWork]) -> list[asyncio.Task[None]]:
    """Start each work as a task of the running loop; return the tasks, for their owner to cancel."""
    loop = asyncio.get_running_loop()
    return [loop.create_task(_keep_running(work)) for work in works]


async def _keep_running(work: BackgroundWork) -> None:
    """Run work until it returns, and start it again after an unforeseen exception."""
    while True:
        try:
            await work()
            return
        except Exception as error:
            report("loop", error, "in background work")
            await asyncio.sleep(_RESTART_DELAY)


def report_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception that no callback or task has caught, as an incident: the exception handler of loops."""
    message = context.get("message", "")
    report("loop", context.get("exception") or RuntimeError(message), f"({message})")
