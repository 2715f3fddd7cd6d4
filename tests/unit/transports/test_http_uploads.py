"""What happens around the decoding of an image, which runs beside the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from test_http_pixels import COLOURS, encoded

from doubles import Incident
from http_peer import Peer, request
from nerite.core import tensor as dtypes
from nerite.core.request import InferenceRequest
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Array
from nerite.core.work_loop import WorkLoops
from nerite.routes.table import RouteTable
from nerite.transports.http import files, uploads
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.limits import TransportLimits

POST = request("/v2/models/m/infer", encoded(), "Content-Type: image/png")


class FakeServer:
    """Has one model, which takes pixels; keeps the inferences it is given."""

    routes = RouteTable()
    loops = WorkLoops()

    def __init__(self) -> None:
        self.begun: list[InferenceRequest] = []
        self.arrived: asyncio.Queue[InferenceRequest] = asyncio.Queue()
        self.raises: Exception | None = None

    def find(self, model: str, version: str) -> object:
        return SimpleNamespace(signature=Signature("m", 4, [SignatureInput("IMAGE", dtypes.UINT8, (-1, -1, 3))], []))

    def infer(self, request: InferenceRequest) -> None:
        if self.raises is not None:
            raise self.raises
        self.begun.append(request)
        self.arrived.put_nowait(request)


class Bench:
    """A connection, and a decoder that waits until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server: Any = FakeServer()
        self.decoders = ThreadPoolExecutor(2)
        monkeypatch.setattr(uploads, "ThreadPoolExecutor", lambda *_: self.decoders)
        router = Router(self.server, max_input_size=1000, locks={})
        service: Any = HttpService(self.server, router.target, TransportLimits(), max_input_size=1000)
        self.peer: Any = Peer(service)
        self.go_on = threading.Event()
        self.threads: list[int] = []
        read = files.read_image

        def slow(declared: SignatureInput, data: Any, max_size: int) -> Array:
            self.threads.append(threading.get_ident())
            assert self.go_on.wait(20)
            return read(declared, data, max_size)

        monkeypatch.setattr(files, "read_image", slow)

    async def decoded(self) -> None:
        """Let the decoder go on, and return when all of its work has arrived."""
        self.go_on.set()
        await asyncio.to_thread(self.decoders.shutdown)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.go_on.set()
    made.decoders.shutdown()


def test_an_image_is_decoded_beside_the_loop(bench: Bench) -> None:
    async def run() -> None:
        bench.peer.send(POST)
        assert bench.server.begun == []
        await bench.decoded()

    asyncio.run(run())
    (begun,) = bench.server.begun
    assert bench.threads and threading.get_ident() not in bench.threads
    assert (begun.header.inputs[0].shape, bytes(begun.data[0])) == ((1, 2, 3, 3), COLOURS.tobytes())
    assert not begun.header.binary_by_default
    bench.peer.lose()
    assert begun.cancelled


def test_nobody_works_for_a_client_that_left_meanwhile(bench: Bench) -> None:
    async def run() -> None:
        bench.peer.send(POST)
        bench.peer.lose()
        await bench.decoded()

    asyncio.run(run())
    assert bench.server.begun == []
    assert bench.peer.answers() == []


def test_a_mistake_of_ours_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        bench.server.raises = ValueError("a mistake")
        bench.peer.send(POST)
        await bench.decoded()

    asyncio.run(run())
    assert bench.peer.answers() == [(500, Incident('{"error":"', '"}'))]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_requests_of_one_kind_share_a_header(bench: Bench) -> None:
    bench.go_on.set()

    async def run() -> None:
        for _ in range(2):
            bench.peer.send(POST)
            await bench.server.arrived.get()
            bench.peer.connection.send([b"HTTP/1.1 200 OK\r\n\r\n"])

    asyncio.run(run())
    first, second = bench.server.begun
    assert first.header is second.header
