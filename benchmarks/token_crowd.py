"""Many who ask for streams of tokens and do not wait for each other: one process, one loop, as light as Python allows.

A ``Crowd`` sends what it is told to and says how each request was answered. ``at_capacity`` has so many under way all
the time; ``at_a_rate`` sends at random moments, whatever comes back.
"""

from __future__ import annotations

import random
import re
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

_TOKENS: Final = re.compile(rb'"num_output_tokens": ?(\d+)')
_LIMIT: Final = re.compile(rb"\((\w+) of ")
_SEEN: Final = 400
"""Bytes of an error in which its limit is looked for."""
_END: Final = b"\r\n0\r\n\r\n"
_PATIENCE: Final = 120.0
"""Seconds after the last request in which the last answer has to be there."""


class Asked(NamedTuple):
    """A request. Its stream says with each event how many tokens came."""

    tenant: str
    level: str
    prompt: int
    """Tokens."""
    message: bytes


@dataclass(eq=False, slots=True)
class Answer:
    """What came of a request. Times as ``time.perf_counter`` has them."""

    asked: Asked
    due: float
    """When it was to be sent."""
    first: float = 0.0
    """When its first token came."""
    ended: float = 0.0
    tokens: int = 0
    limit: str = ""
    """The one for which it was refused, or cut; empty: it is complete."""
    retry_after: bool = False
    """The refusal says when to come again."""


class Crowd:
    """Those who ask one server. Their connections are used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self.under_way = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()

    def ask(self, asked: Asked, due: float) -> None:
        """Send a request that was due then."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = _Connection(self._port)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.ask(Answer(asked, due))
        self.under_way += 1

    def answers(self, seconds: float) -> list[Answer]:
        """Read what comes within that time, as soon as anything does; return what is complete now."""
        complete = []
        for key, _ in self._selector.select(max(seconds, 0.0)):
            connection: _Connection = key.data
            if connection.read():
                complete.append(connection.answer)
                self._idle.append(connection)
                self.under_way -= 1
        return complete


class _Connection:
    """Has one request under way, or none."""

    answer: Answer

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""
        self._status = 0
        self._size: int | None = None

    def ask(self, answer: Answer) -> None:
        self.answer = answer
        self._held, self._status = b"", 0
        self.socket.sendall(answer.asked.message)

    def read(self) -> bool:
        """Take what is there; return whether the answer is complete."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise RuntimeError("the server has closed a connection")
        self._held += received
        if not self._status and not self._head():
            return False
        answer = self.answer
        if self._size is not None:
            complete = len(self._held) >= self._size
        else:
            end = self._held.rfind(b"\n\n")
            self._events(self._held[: end + 1])
            self._held = self._held[end + 1 :]
            complete = self._held.endswith(_END)
        if complete:
            answer.ended = time.perf_counter()
            if self._status != 200 and not answer.limit:
                answer.limit = _limit(self._held)
        return complete

    def _head(self) -> bool:
        """Read the head of the answer, if it is there."""
        head, found, self._held = self._held.partition(b"\r\n\r\n")
        if not found:
            self._held = head
            return False
        lower = head.lower()
        self._status = int(head[9:12])
        self.answer.retry_after = b"\r\nretry-after:" in lower
        _, known, rest = lower.partition(b"\r\ncontent-length:")
        self._size = int(rest.partition(b"\r\n")[0]) if known else None
        return True

    def _events(self, events: bytes) -> None:
        answer = self.answer
        for count in _TOKENS.findall(events):
            if not answer.tokens:
                answer.first = time.perf_counter()
            answer.tokens += int(count)
        place = events.find(b'{"error"')
        if place >= 0:
            answer.limit = _limit(events[place:])


def _limit(error: bytes) -> str:
    found = _LIMIT.search(error[:_SEEN])
    return found[1].decode() if found else error[:_SEEN].decode(errors="replace")


def at_capacity(port: int, asks: Iterator[Asked], streams: int, seconds: float) -> tuple[float, list[Answer]]:
    """Have ``streams`` requests under way for that time; return when it began, and all answers."""
    answers: list[Answer] = []
    with Crowd(port) as crowd:
        began = time.perf_counter()
        for _ in range(streams):
            crowd.ask(next(asks), began)
        while crowd.under_way:
            complete = crowd.answers(_PATIENCE)
            if not complete and time.perf_counter() - began > seconds + _PATIENCE:
                raise RuntimeError(f"{crowd.under_way} requests are not answered")
            answers += complete
            if (now := time.perf_counter()) < began + seconds:
                for _ in complete:
                    crowd.ask(next(asks), now)
    return began, answers


def at_a_rate(
    port: int, asks: Iterator[Asked], rate: float, seconds: float, chance: random.Random
) -> tuple[float, list[Answer]]:
    """Ask ``rate`` times a second, at random moments, for that time; return when it began, and all answers."""
    answers: list[Answer] = []
    with Crowd(port) as crowd:
        began = now = time.perf_counter()
        end = began + seconds
        due = began + chance.expovariate(rate)
        while due < end or crowd.under_way:
            answers += crowd.answers(due - now if due < end else 1.0)
            now = time.perf_counter()
            while due <= min(now, end):
                crowd.ask(next(asks), due)
                due += chance.expovariate(rate)
            if now > end + _PATIENCE:
                raise RuntimeError(f"{crowd.under_way} requests are not answered")
    return began, answers
