"""Calls that take their time: run beside everything else, and answered when they are over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.transports.http import reply
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.reply import Reply


class Errands:
    """The coroutines that are under way."""

    def __init__(self, refusal_of: Callable[[NeriteError], Reply] = reply.error_reply) -> None:
        """``refusal_of`` makes the answer of one that is refused."""
        self._refusal_of = refusal_of
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connection: HttpExchange, work: Coroutine[Any, Any, Reply]) -> None:
        """Run a coroutine, and send what it returns."""

        async def run() -> None:
            try:
                answer = await work
            except NeriteError as error:
                answer = self._refusal_of(error)
            except Exception as error:
                answer = self._refusal_of(report("http", error, "in a call that takes its time"))
            connection.send([answer.encode(), *answer.rest])

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
