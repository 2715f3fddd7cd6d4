"""What the HTTP service does around the endpoints. What those answer is asked of a running server."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from doubles import FakeAside, Incident
from http_peer import Peer, replies, request
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NotFound, Unavailable
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.core.work_loop import WorkLoops
from nerite.routes.table import RouteTable
from nerite.transports.access import AccessKeys, Lock
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.limits import TransportLimits

BODY = b'{"inputs":[]}'
OK = InferenceResponse(ResponseHeader("m", "1", []))


class FakeServer:
    """Keeps the inferences it is given; raises what it is told to raise."""

    routes = RouteTable()
    loops = WorkLoops()

    def __init__(self) -> None:
        self.begun: list[InferenceRequest] = []
        self.loaded: list[tuple[str, Mapping[str, Any]]] = []
        self.raises: Exception | None = None
        self.live = True

    def receive_buffer(self, model: str, version: str, size: int, data_at: int) -> memoryview | None:
        return None

    def request(self, header: RequestHeader, data: Any, sink: Any, arrived_ns: int, id: str) -> InferenceRequest:
        return InferenceRequest(header, data, sink, arrived_ns, id)

    def find(self, model: str, version: str) -> object:
        if model == "none":
            raise NotFound("Request for unknown model: 'none' is not found")
        return object()

    def signature_of(self, request: InferenceRequest) -> Signature:
        return Signature("m", 0, [], [])

    def infer(self, request: InferenceRequest) -> None:
        if self.raises is not None:
            raise self.raises
        self.begun.append(request)

    async def load_for_client(self, model: str, parameters: Mapping[str, Any]) -> None:
        self.loaded.append((model, parameters))
        if self.raises is not None:
            raise self.raises


class Bench:
    def __init__(self, max_input_size: int = 1000) -> None:
        self.server: Any = FakeServer()
        self.aside = FakeAside()
        self.bounds = TransportLimits(max_bytes=10_000_000, aside=self.aside)
        router = Router(
            self.server, max_input_size=max_input_size, locks={"health": Lock("key", AccessKeys([b"secret"]))}
        )
        service: Any = HttpService(self.server, router.target, self.bounds, max_input_size=max_input_size)
        self.peer = Peer(service, max_body=max_input_size, bounds=self.bounds)

    def ask(self, path: str, body: bytes = b"", *headers: str, method: str = "POST") -> list[tuple[int, Any]]:
        self.peer.send(request(path, body, *headers, method=method))
        return self.answers()

    def answers(self) -> list[tuple[int, Any]]:
        return [(status, json.loads(body) if body else None) for status, body in self.peer.answers()]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_inference(bench: Bench) -> None:
    assert bench.ask("/v2/models/m/versions/3/infer", b'{"id":"7","inputs":[]}') == []
    (begun,) = bench.server.begun
    assert (begun.id, begun.header.model_name, begun.header.model_version) == ("7", "m", "3")
    begun.respond(OK)
    assert bench.answers() == [(200, {"id": "7", "model_name": "m", "model_version": "1", "outputs": []})]


def test_an_inference_that_fails(bench: Bench) -> None:
    bench.ask("/v2/models/m/infer", BODY)
    bench.server.begun[0].respond(InferenceResponse.failed(Unavailable("not now")))
    assert bench.answers() == [(503, {"error": "not now"})]


def test_a_model_that_there_is_not_comes_before_what_is_wrong_with_the_question(bench: Bench) -> None:
    ((status, body),) = bench.ask("/v2/models/none/infer", b"{")
    assert (status, body) == (404, {"error": "Request for unknown model: 'none' is not found"})
    ((status, body),) = bench.ask("/v2/models/m/infer", b"{")
    assert status == 500


def test_a_body_that_cannot_be_unpacked(bench: Bench) -> None:
    bench.peer.send(request("/v2/models/m/infer", b"", "Content-Encoding: gzip"))
    ((status, headers, body),) = replies(bench.peer.transport.taken())
    assert (status, headers["content-type"]) == (400, "text/plain")
    assert json.loads(body) == {"error": "nothing to be decompressed"}
    ((status, _),) = bench.ask("/v2/models/none/infer", b"no gzip", "Content-Encoding: gzip")
    assert status == 404
    for encoding in ("", "br"):
        told = bench.ask("/v2/models/m/infer", BODY, f"Content-Encoding: {encoding}")
        assert told == [(501, {"error": "Unsupported compression type"})]


def test_nothing_and_not_this_way(bench: Bench) -> None:
    told = "Not Found (endpoints begin with /v2; /v2/docs lists them)"
    assert bench.ask("/v2/nothing", method="GET") == [(404, {"error": told})]
    assert bench.ask("/v2/models/m/infer", method="GET") == [(405, {"error": "Method Not Allowed"})]


@pytest.mark.parametrize("kind", ["infer", "generate", "config", "stats"])
def test_a_name_in_the_path_is_of_bounded_length(bench: Bench, kind: str) -> None:
    method = "POST" if kind in ("infer", "generate") else "GET"
    told = {"error": "the model in the path is 2000 characters long, more than the 1024 that are allowed"}
    assert bench.ask(f"/v2/models/{'m' * 2_000}/{kind}", BODY, method=method) == [(400, told)]


def test_behind_a_key(bench: Bench) -> None:
    told = [(403, {"error": "This API is restricted, expecting header 'key'"})]
    assert bench.ask("/v2/health/live", method="GET") == told
    assert bench.ask("/v2/health/live", b"", "key: wrong", method="GET") == told
    assert bench.ask("/v2/health/live", b"", "KEY: secret ", method="GET") == [(200, None)]


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index", "/v2/nothing"])
def test_a_body_that_is_too_large_for_anything(bench: Bench, path: str) -> None:
    ((status, body),) = bench.ask(path, b"x" * 1001)
    assert status == 400
    assert body["error"].startswith("request JSON size of 1001 bytes exceeds the maximum allowed input size of 1000")


def test_an_answer_that_cannot_be_written_is_still_an_answer(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.ask("/v2/models/m/infer", BODY)
    bench.server.begun[0].respond(InferenceResponse(ResponseHeader("m", "1", [], {"beyond": 2**70})))
    assert bench.answers() == [(500, {"error": Incident()})]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_mistake_of_ours_is_told_and_forgotten(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Also by the next request, whose late failure is its own and not that of a request that was never accepted."""
    bench.server.raises = ValueError("a mistake")
    assert bench.ask("/v2/models/none/infer", BODY) == [(500, {"error": Incident()})]
    bench.server.raises = None
    bench.ask("/v2/models/m/infer", BODY)
    bench.server.begun[0].respond(InferenceResponse.failed(Internal("why")))
    assert bench.answers() == [(500, {"error": "why"})]
    assert len(caplog.records) == 1


def load(bench: Bench, body: bytes) -> list[tuple[int, Any]]:
    """Ask for a load, and wait for the answer."""

    async def ask() -> list[tuple[int, Any]]:
        answers = bench.ask("/v2/repository/models/m/load", body)
        while not answers:
            await asyncio.sleep(0)
            answers = bench.answers()
        return answers

    return asyncio.run(ask())


def test_a_load(bench: Bench) -> None:
    assert load(bench, b"") == [(200, None)]
    assert load(bench, b'{"parameters":{"config":"{}"}}') == [(200, None)]
    assert bench.server.loaded == [("m", {}), ("m", {"config": "{}"})]


def test_a_load_with_parameters_that_cannot_be(bench: Bench) -> None:
    ((status, body),) = load(bench, b'{"parameters":null}')
    assert (status, body["error"].splitlines()[0]) == (500, "attempt to get members for non-object")
    assert bench.server.loaded == []


def test_a_mistake_of_ours_in_a_load_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.server.raises = ValueError("a mistake")
    assert load(bench, b"") == [(500, {"error": Incident()})]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_inference_again_with_other_data(bench: Bench) -> None:
    """What comes in one piece and begins as the request before is known by that; so is what it wants back."""
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    spec = TensorSpec("OUT", dtypes.BYTES, (1,))
    again = 0
    handle_again = bench.peer.handler.handle_again

    def counted(*arguments: Any) -> None:
        nonlocal again
        again += 1
        handle_again(*arguments)

    bench.peer.handler.handle_again = counted  # type: ignore[method-assign]
    for parameters, letter, expected in (
        ({"base64": True}, b"a", {"b64": "YQ=="}),
        ({"base64": True}, b"b", {"b64": "Yg=="}),
        ({}, b"c", "c"),
        ({}, b"d", "d"),
        ({"base64": True}, b"e", {"b64": "ZQ=="}),
    ):
        text = json.dumps({"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": parameters}]}).encode()
        bench.ask("/v2/models/m/infer", text + join_bytes([letter]), f"Inference-Header-Content-Length: {len(text)}")
        begun = bench.server.begun[-1]
        begun.respond(InferenceResponse(ResponseHeader("m", "1", [spec]), begun.data))
        ((status, body),) = bench.answers()
        assert (status, body["outputs"][0]["data"]) == (200, [expected])
    assert again == 3, "the second of each kind, and the last: the connection knows both, as they differ in length"


# What takes long to unpack


def large(size: int = 1_000_000) -> bytes:
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    lines = (f"Inference-Header-Content-Length: {len(head)}", "Content-Encoding: gzip")
    return request("/v2/models/m/infer", gzip.compress(head + bytes(size)), *lines)


def test_a_body_that_unpacks_to_much_is_unpacked_aside() -> None:
    bench = Bench(2_000_000)
    bench.peer.send(large())
    assert bench.server.begun == []
    bench.aside.do()
    (begun,) = bench.server.begun
    assert len(begun.data[0]) == 1_000_000
    assert bench.bounds.bytes.used > 1_000_000
    begun.respond(OK)
    assert [status for status, _ in bench.answers()] == [200]
    assert bench.bounds.bytes.used == 0


def test_a_body_that_unpacks_beyond_the_limit() -> None:
    bench = Bench(500_000)
    bench.peer.send(large())
    bench.aside.do()
    ((status, body),) = bench.answers()
    assert status == 400
    assert body["error"].startswith("Decompressed data size exceeds the maximum allowed value of 500000 bytes")
    assert bench.bounds.bytes.used == 0


def test_a_body_that_there_is_no_room_for_once_it_is_unpacked() -> None:
    bench = Bench(2_000_000)
    bench.bounds.bytes.limit = 500_000
    bench.peer.send(large())
    bench.aside.do()
    ((status, body),) = bench.answers()
    assert (status, "--max-bytes-in-flight" in body["error"]) == (429, True)
    assert bench.bounds.bytes.used == 0


def test_a_client_that_goes_while_its_body_is_unpacked() -> None:
    bench = Bench(2_000_000)
    bench.peer.send(large())
    bench.peer.lose()
    bench.aside.do()
    assert (bench.server.begun, bench.bounds.bytes.used) == ([], 0)


def test_an_error_in_a_thread_is_an_answer() -> None:
    bench = Bench(2_000_000)
    bench.server.request = None
    bench.peer.send(large())
    bench.aside.do()
    assert bench.answers() == [(500, {"error": Incident()})]
