"""The memory of a router that is sent very many prompts, no two alike."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop
from footprint import own
from paced_engine import MODEL
from routed_by import Members, Router, RunningRouter
from routed_client import AnswerReader, RoutedAnswer, chat_message
from routed_members import engines

_UNDER_WAY: Final = 16
_SAMPLES: Final = 10
_TOKENS: Final = 500
"""Of each prompt: seven beginnings of it are hashed."""


class Prompts:
    """Prompts that differ from their first word on, and what became of them."""

    def __init__(self, count: int, router: RunningRouter) -> None:
        self._count = count
        self._router = router
        self._began = time.perf_counter()
        self._body = " word" * (_TOKENS * 4 // 5)
        self._asked = self._done = self._failed = 0
        self.complete = asyncio.Event()
        self.rows: list[str] = []

    def next_message(self) -> bytes:
        """Return the next request, or nothing after the last."""
        if self._asked == self._count:
            return b""
        self._asked += 1
        return chat_message(MODEL, f"{self._asked:09d}{self._body}", 40)

    def note(self, answer: RoutedAnswer) -> None:
        """Note an answer, and now and then the memory."""
        self._done += 1
        self._failed += bool(answer.problem)
        if not self._done % max(self._count // _SAMPLES, 1):
            rate = self._done / (time.perf_counter() - self._began)
            self.rows.append(f"| {self._done:,} | {own(self._router.pid):.1f} | {rate:,.0f} | {self._failed} |")
        if self._done == self._count:
            self.complete.set()


class _Asker(asyncio.Protocol):
    """A connection that has always one request under way."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._reader: AnswerReader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        message = self._prompts.next_message()
        if message:
            self._reader = AnswerReader(RoutedAnswer(0.0))
            self._transport.write(message)  # type: ignore[attr-defined]  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._reader.feed(data, 1.0):
            self._prompts.note(self._reader.answer)
            self._ask()


def memory_table(router: Router, count: int) -> str:
    """Return the memory of a router after so many prompts, and in between."""

    async def body(running: RunningRouter) -> list[str]:
        prompts = Prompts(count, running)
        loop = asyncio.get_running_loop()
        for _ in range(_UNDER_WAY):
            await loop.create_connection(lambda: _Asker(prompts), "127.0.0.1", running.port)
        await prompts.complete.wait()
        return prompts.rows

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with ExitStack() as stack:
            members = stack.enter_context(engines([["--fixed=0"]] * 2, folder))
            running = stack.enter_context(router.running(Members([each.port for each in members]), folder / "router"))
            before = own(running.pid)
            rows = uvloop.run(body(running))
    lines = [
        f"**Memory**: prompts of {_TOKENS} tokens, no two alike, {_UNDER_WAY} at a time.\n",
        "| prompts | memory of the router, MB | requests/s | failed |",
        "|---|---|---|---|",
        f"| 0 | {before:.1f} | | |",
    ]
    return "\n".join([*lines, *rows]) + "\n"
