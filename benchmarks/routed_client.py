"""A client that sends at random moments, whatever comes back, and reads answers and streams of the OpenAI API.

It looks at what comes as little as possible, for it runs beside what it measures. Times count from the sending, which
is within a millisecond of a request's moment, however many are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import uvloop

MOST_UNDER_WAY: Final = 2000
"""Requests at a time; those that would be more count as failed."""
_PATIENCE: Final = 20.0
"""Seconds after the last request in which answers have to end."""
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"(?i)content-length: *(\d+)")
_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_PROMPT: Final = re.compile(rb'"prompt_tokens": ?(\d+)')
_FINISHED: Final = re.compile(rb'"finish_reason": ?"')
_SERVED: Final = re.compile(rb'"served_us": ?(\d+)')
_TAIL: Final = 700
"""Bytes at the end of an answer in which its usage is."""


@dataclass(slots=True)
class RoutedAnswer:
    """What came of a request. Times as ``time.perf_counter`` has them."""

    sent: float
    first: float = 0.0
    """When its first token came; 0: never."""
    ended: float = 0.0
    """When its answer was complete; 0: never."""
    prompt: int = 0
    cached: int = 0
    """Tokens of the prompt, and those that the member had in its cache."""
    served: float = 0.0
    """Seconds that the member had the request, if it says so."""
    problem: str = ""
    """Why there is no complete answer."""


class AnswerReader:
    """Reads one answer over HTTP/1.1."""

    def __init__(self, answer: RoutedAnswer) -> None:
        self.answer = answer
        self._head = b""
        self._status = b""
        self._left = -1
        """Bytes of the body that are still to come; -1: it has chunks."""
        self._tail = b""

    def feed(self, data: bytes, now: float) -> bool:
        """Take what came; return whether the answer is complete."""
        if not self._status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return False
            status = _STATUS.match(head)
            self._status = status[1] if status else b"???"
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else -1
        answer = self.answer
        self._tail += data
        if not answer.first and data and (self._left >= 0 or b"data: {" in self._tail):
            answer.first = now
        self._tail = self._tail[-_TAIL:]
        if self._left >= 0:
            self._left -= len(data)
            complete = self._left <= 0
        else:
            complete = self._tail.endswith(b"\r\n0\r\n\r\n")
        if complete:
            self._end(now)
        return complete

    def _end(self, now: float) -> None:
        answer, tail = self.answer, self._tail
        if self._status != b"200":
            answer.first = 0.0
            answer.problem = f"status {self._status.decode()}: {tail[:200].decode(errors='replace')}"
            return
        # Some routers end a stream that was cut as if it were complete.
        if self._left < 0 and not (b"data: [DONE]" in tail and _FINISHED.search(tail)):
            answer.problem = "its stream was cut"
            return
        answer.ended = now
        if found := _CACHED.search(tail):
            answer.cached = int(found[1])
        if found := _PROMPT.search(tail):
            answer.prompt = int(found[1])
        if found := _SERVED.search(tail):
            answer.served = int(found[1]) / 1e6


class _Connection(asyncio.Protocol):
    """Has one request under way, or none."""

    def __init__(self, idle: list[_Connection], load: OpenLoop) -> None:
        self._idle = idle
        self._load = load
        self._reader: AnswerReader | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, message: bytes, answer: RoutedAnswer) -> None:
        self._reader = AnswerReader(answer)
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        if self._reader is not None and self._reader.feed(data, time.perf_counter()):
            self._reader = None
            self._load.done()
            self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reader is not None:
            answer, self._reader = self._reader.answer, None
            answer.problem = "its stream was cut" if answer.first else "the connection was closed without an answer"
            self._load.done()


class OpenLoop:
    """Sends requests to one or several ports in turn."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._idle: list[list[_Connection]] = [[] for _ in ports]
        self._under_way = 0
        self._all_sent = False
        self._over = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self.answers: list[RoutedAnswer] = []

    def done(self) -> None:
        """Note the end of a request."""
        self._under_way -= 1
        if self._all_sent and not self._under_way:
            self._over.set()

    def ask(self, message: bytes) -> None:
        """Send a request now."""
        answer = RoutedAnswer(time.perf_counter())
        turn = len(self.answers) % len(self._ports)
        self.answers.append(answer)
        if self._under_way >= MOST_UNDER_WAY:
            answer.problem = f"not sent: {MOST_UNDER_WAY} were under way"
            return
        self._under_way += 1
        idle = self._idle[turn]
        while idle:
            connection = idle.pop()
            if not connection.closed:
                connection.ask(message, answer)
                return
        task = asyncio.get_running_loop().create_task(self._connect(turn, message, answer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, turn: int, message: bytes, answer: RoutedAnswer) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle[turn], self), "127.0.0.1", self._ports[turn]
            )
        except OSError as error:
            answer.problem = f"no connection: {error}"
            self.done()
        else:
            connection.ask(message, answer)

    async def run(self, messages: Iterator[bytes], rate: float, seconds: float, chance: random.Random) -> None:
        """Send so many requests a second on average, for a time, and wait for the answers."""
        due = time.perf_counter()
        end = due + seconds
        while (due := due + chance.expovariate(rate)) < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            self.ask(next(messages))
        if self._under_way:
            self._all_sent = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._over.wait()
        for answer in self.answers:
            if not (answer.ended or answer.problem):
                answer.problem = "never ended"


def run(
    ports: Sequence[int], messages: Iterator[bytes], rate: float, seconds: float, chance: random.Random
) -> list[RoutedAnswer]:
    """Send requests in an open loop, in this process; return what came of them."""

    async def body() -> list[RoutedAnswer]:
        load = OpenLoop(ports)
        await load.run(messages, rate, seconds, chance)
        return load.answers

    gc.collect()
    gc.disable()
    try:
        return uvloop.run(body())
    finally:
        gc.enable()


def chat_message(model: str, prompt: str, tokens: int, **more: Any) -> bytes:
    """Return a request for a chat completion, as it is sent."""
    messages = [{"role": "user", "content": prompt}]
    fields = {"model": model, "messages": messages, "max_tokens": tokens, **more}
    body = json.dumps(fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
