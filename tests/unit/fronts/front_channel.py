"""Both ends of the channel between core and front, connected by real sockets on one event loop.

What is on either side of the channel is a fake: the server, the owner of the core's end, and the rest of the front. The
loop's time is the test's: it passes only as much as ``Ends.pass_time`` says.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from doubles import Caller
from nerite.core import tensor as dtypes
from nerite.core.memory import memory_file
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec
from nerite.fronts import core_connection, front_connection
from nerite.fronts.core_connection import CoreConnection
from nerite.fronts.front_connection import FrontConnection
from nerite.fronts.messages import DrainStep
from nerite.workers.host.fork_server import ForkedProcess
from nerite.workers.ipc.shared_memory import Arena, ForeignSegments

LARGE = 100_000
"""Size of a tensor that goes through shared memory."""
MOST_CONNECTIONS = 1000
"""Number of connections for which the front has descriptors."""


class Process(ForkedProcess):
    """A process that does not exist."""

    killed: str | None = None

    def kill(self, reason: str = "") -> None:
        self.killed = reason


class CountingSocket(socket.socket):
    """Counts system calls that send."""

    sends = 0

    def send(self, *arguments: Any) -> int:
        self.sends += 1
        return super().send(*arguments)


class FakeServer:
    """Keeps requests, or answers them at once."""

    demand = None

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []
        self.answers: Callable[[InferenceRequest], None] | None = None

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        assert decoupled == "", "models with several responses are refused by the front"
        self.requests.append(request)
        if self.answers is not None:
            self.answers(request)

    def infer_all(self, requests: Sequence[InferenceRequest]) -> None:
        assert len({request.header for request in requests}) == 1
        for request in requests:
            self.infer(request, "")


class FakeOwner:
    """The pool, as the core's end sees it."""

    def __init__(self) -> None:
        self.http_handler: Any = None
        self.administered: list[tuple[str, str, bytes, Any]] = []
        self.told: list[object] = []
        self.waiting: list[Callable[[], None]] | None = None
        """Replies that wait for an acknowledgement; None if none has to."""

    def administer(self, path: str, owner: str, content: bytes, answer: Any) -> None:
        self.administered.append((path, owner, content, answer))

    def publish(self) -> None:
        self.told.append("publish")

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        if self.waiting is None:
            send()
        else:
            self.waiting.append(send)

    def acknowledged(self) -> None:
        self.told.append("acknowledged")

    def ready(self, front: FrontConnection) -> None:
        self.told.append("ready")

    def log(self, record: list[Any]) -> None:
        self.told.append(record)

    def counted(self, front: FrontConnection, figures: Any) -> None:
        self.told.append(dict(figures))

    def lost(self, front: FrontConnection) -> None:
        self.told.append("lost")


class FakeFront:
    """The rest of the front, as its end sees it."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.adopted: list[tuple[socket.socket, int, int]] = []

    def start(self, state: bytes, bytes_file: int) -> None:
        os.close(bytes_file)
        self.told.append(("start", pickle.loads(state)))

    def change(self, state: bytes) -> None:
        self.told.append(("change", *pickle.loads(state)))

    def adopt(self, connection: socket.socket, port: int, limit: int) -> None:
        self.adopted.append((connection, port, limit))

    def drain(self, step: DrainStep) -> None:
        self.told.append(step)

    def figures(self) -> dict[str, Any]:
        return {"bytes": 7}

    def retire(self, share: float, most: float) -> None:
        self.told.append((share, most))

    def lost(self) -> None:
        self.told.append("lost")


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Ends:
    """A core and a front."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.arenas: list[Arena] = []
        for module in (front_connection, core_connection):
            patch.setattr(module, "Arena", self._arena)
        self.server, self.owner, self.events = FakeServer(), FakeOwner(), FakeFront()
        here, there = socket.socketpair()
        channel = CountingSocket(fileno=here.detach())
        self.sockets = [channel, CountingSocket(fileno=there.detach())]
        """The core's, and the front's."""
        descriptors, others = socket.socketpair()
        self.process = Process("front_0", channel, descriptors)
        server: Any = self.server
        self.core = FrontConnection(self.process, ForeignSegments(), server, self.owner, MOST_CONNECTIONS)
        """The core's end."""
        self.front = CoreConnection(self.sockets[1], others, ForeignSegments(), self.events)
        """The front's end."""
        start: Any = "a start"
        bytes_file = memory_file(8)
        self.core.start(self.loop, start, bytes_file)
        os.close(bytes_file)
        self.front.begin(self.loop)

    def _arena(self) -> Arena:
        self.arenas.append(Arena())
        return self.arenas[-1]

    @property
    def live(self) -> list[int]:
        """Number of pieces of shared memory in use: the core's, and the front's."""
        return [len(arena.live) for arena in self.arenas]

    async def settle(self) -> None:
        """Have everything arrive that was sent. A socket of this kind delivers at once."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        assert isinstance(self.loop, TimedLoop)
        self.loop.now += seconds
        await self.settle()

    async def call(self, caller: Caller, header: RequestHeader, *data: Buffer, id: str = "") -> InferenceRequest:
        """Have the front send a request."""
        request = InferenceRequest(header, data, caller, 123, id)
        self.front.call(request)
        await self.settle()
        return request

    def close(self) -> None:
        self.core.close()
        self.front.close()
        for arena in self.arenas:
            arena.close()


def tell(patch: pytest.MonkeyPatch, story: Callable[[Ends], Coroutine[Any, Any, None]]) -> None:
    """Run a test with both ends."""

    async def told() -> None:
        ends = Ends(patch)
        try:
            await ends.settle()
            await story(ends)
        finally:
            ends.close()

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(told())


def asked(*sizes: int, model: str = "model", **fields: Any) -> RequestHeader:
    """A header with inputs of these sizes."""
    return RequestHeader(model, "", specs("IN", sizes), **fields)


def answered(*sizes: int, **parameters: Any) -> ResponseHeader:
    """A header of a response with outputs of these sizes."""
    return ResponseHeader("model", "1", specs("OUT", sizes), parameters)


def specs(name: str, sizes: Sequence[int]) -> list[TensorSpec]:
    return [TensorSpec(f"{name}{place}", dtypes.UINT8, (size,)) for place, size in enumerate(sizes)]


def tensor(size: int, value: int = 1) -> bytes:
    return bytes([value]) * size


def response(*sizes: int, value: int = 2, **parameters: Any) -> InferenceResponse:
    return InferenceResponse(answered(*sizes, **parameters), [tensor(size, value) for size in sizes])


def values(data: Sequence[Buffer]) -> list[bytes]:
    return [bytes(each) for each in data]
