"""An open load over HTTP: requests are sent when they are due, and each has to get exactly one answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from serving import PATIENCE, Serving

RATE: Final = 200
"""Requests per second."""
_CUT_EVERY: Final = 8
"""Of so many requests that may be cut, one is."""
_SHOWN: Final = 5

Body = Callable[[int], dict[str, Any]]
"""Returns the body of a request with this number."""
Read = Callable[[int, Sequence[dict[str, Any]]], str]
"""Returns the version that has answered a request, given all parts of the answer. Raises if they do not belong to it,
or are not all there."""


class _Connection:
    """A connection of which the answer to one request at a time is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.closes = False
        """The server has announced that it closes the connection."""

    async def ask(self, path: str, body: bytes) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Send a request; yield the status and each part of the answer: the body, or the events of a stream."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status = int(lines[0].split()[1])
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        self.closes = fields.get("connection") == "close"
        if "content-length" in fields:
            yield status, json.loads(await self._reader.readexactly(int(fields["content-length"])))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            chunk = await self._reader.readexactly(size + 2)
            for event in chunk.decode().split("\n\n"):
                if event.strip():
                    yield status, json.loads(event.strip().removeprefix("data: "))
        await self._reader.readexactly(2)

    async def rest(self) -> bytes:
        """Return what comes after the last answer, until the server closes the connection: nothing, if all is well."""
        self._writer.write_eof()
        rest = await self._reader.read()
        self._writer.close()
        return rest

    def cut(self) -> None:
        """Disconnect."""
        self._writer.transport.abort()


class SteadyLoad:
    """Sends ``RATE`` requests a second, whether or not earlier ones were answered, from a thread of its own."""

    def __init__(
        self, server: Serving, path: str, body: Body, read: Read, *, cuts: bool = False, most: int = 1_000_000
    ) -> None:
        """``cuts``: some clients disconnect after the first part of their answer.

        ``most``: while so many requests are not answered, the others wait: on a machine that is too slow for this load.
        """
        self._server = server
        self._path = path
        self._body = body
        self._read = read
        self._cuts = cuts
        self._most = most
        self._idle: list[_Connection] = []
        self._stop = threading.Event()
        self.sent = self.cut = 0
        self.answers: Counter[str] = Counter()
        """Complete answers by the version that gave them."""
        self.failures: Counter[str] = Counter()
        """Answers that are errors."""
        self.wrong: list[str] = []
        """Requests that got no answer, or one that is not theirs."""
        self.surplus: list[bytes] = []
        """What came on connections after all their answers."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        began, tasks = loop.time(), set()
        while not self._stop.is_set():
            await asyncio.sleep(began + self.sent / RATE - loop.time())
            while len(tasks) >= self._most:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            task = loop.create_task(self._one(self.sent))
            self.sent += 1
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=PATIENCE / 3)
            self.wrong += ["no answer"] * len(hanging)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        self.surplus += filter(None, await asyncio.gather(*(each.rest() for each in self._idle)))

    async def _one(self, number: int) -> None:
        connection = None
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            answer = connection.ask(self._path, json.dumps({"id": f"r{number}", **self._body(number)}).encode())
            parts, failure = [], ""
            async for status, part in answer:
                parts.append(part)
                if status != 200 or "error" in part:
                    failure = str(part.get("error", status))
                elif self._cuts and number % _CUT_EVERY == 0:
                    connection.cut()
                    self.cut += 1
                    return
            if failure:
                self.failures[failure] += 1
            else:
                self.answers[self._read(number, parts)] += 1
            if connection.closes:
                self.surplus += filter(None, [await connection.rest()])
            else:
                self._idle.append(connection)
        except Exception as error:
            self.wrong.append(f"request {number}: {error!r}")
            if connection is not None:
                connection.cut()

    async def _connect(self) -> _Connection:
        host, port = self._server.http.split(":")
        return _Connection(*await asyncio.open_connection(host, int(port)))

    def stop(self) -> None:
        """Send no more, and wait for what is under way."""
        self._stop.set()
        self._thread.join(PATIENCE)

    def check(self) -> None:
        """Assert that each request has got exactly one answer, but for those whose client has disconnected."""
        assert not self.wrong, f"{len(self.wrong)} of {self.sent}: {self.wrong[:_SHOWN]}"
        assert not self.surplus, f"answered twice: {self.surplus[:_SHOWN]}"
        assert self.answers.total() + self.failures.total() + self.cut == self.sent


@contextmanager
def steady(
    server: Serving, path: str, body: Body, read: Read, *, cuts: bool = False, most: int = 1_000_000
) -> Iterator[SteadyLoad]:
    """Send requests meanwhile, of which each has to get exactly one answer."""
    load = SteadyLoad(server, path, body, read, cuts=cuts, most=most)
    try:
        yield load
    finally:
        load.stop()
    load.check()
