"""Large JSON and its connection: order, clients that go, and helpers that fail."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from doubles import FakeAside, Helpers, Incident
from http_peer import Peer, request
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NotFound
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.core.work_loop import WorkLoops
from nerite.routes.table import RouteTable
from nerite.transports.http.json_text import LARGE
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.limits import TransportLimits

MAX_SIZE = 2_000_000
COUNT = 100_000
SIGNATURE = Signature(
    "m", 0, [SignatureInput("IN", dtypes.UINT8, (-1,))], [SignatureOutput("OUT", dtypes.UINT8, (-1,))]
)
TEXTS = Signature("texts", 0, [SignatureInput("IN", dtypes.BYTES, (-1,))], [])
INFER = "/v2/models/m/infer"


class FakeServer:
    """Has two models; keeps the inferences that it is given."""

    routes = RouteTable()
    loops = WorkLoops()

    def __init__(self) -> None:
        self.helpers = Helpers()
        self.begun: list[InferenceRequest] = []
        self.raises: Exception | None = None

    def receive_buffer(self, model: str, version: str, size: int, data_at: int) -> memoryview | None:
        return None

    def request(self, header: RequestHeader, data: Any, sink: Any, arrived_ns: int, id: str) -> InferenceRequest:
        return InferenceRequest(header, data, sink, arrived_ns, id)

    def signature(self, model: str, version: str) -> Signature:
        if model == "none":
            raise NotFound("Request for unknown model: 'none' is not found")
        return TEXTS if model == "texts" else SIGNATURE

    def find(self, model: str, version: str, decoupled: str = "") -> Any:
        return SimpleNamespace(signature=self.signature(model, version))

    def signature_of(self, request: InferenceRequest) -> Signature:
        return SIGNATURE

    def engine_reports(self, model: str) -> list[Any]:
        return []

    def trace_settings(self, model: str) -> None:
        return None

    def infer(self, request: InferenceRequest) -> None:
        if self.raises is not None:
            raise self.raises
        self.begun.append(request)


class Bench:
    def __init__(self) -> None:
        self.server: Any = FakeServer()
        router = Router(self.server, max_input_size=MAX_SIZE, locks={})
        self.aside = FakeAside()
        bounds = TransportLimits(aside=self.aside)
        service: Any = HttpService(self.server, router.target, bounds, max_input_size=MAX_SIZE)
        self.peer = Peer(service, max_body=MAX_SIZE, bounds=bounds)

    def ask(self, body: bytes, *headers: str, path: str = INFER) -> list[tuple[int, Any]]:
        self.peer.send(request(path, body, *headers))
        return self.answers()

    def answers(self) -> list[tuple[int, Any]]:
        return [(status, json.loads(body) if body else None) for status, body in self.peer.answers()]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def asked(count: int = COUNT, datatype: str = "UINT8", **more: Any) -> bytes:
    values: list[Any] = [1] * count if datatype == "UINT8" else ["a"] * count
    tensor = {"name": "IN", "datatype": datatype, "shape": [COUNT if count > 1 else 1], "data": values}
    return json.dumps({"inputs": [tensor], **more}).encode()


def answer(count: int) -> InferenceResponse:
    spec = TensorSpec("OUT", dtypes.UINT8, (count,))
    return InferenceResponse(ResponseHeader("m", "1", [spec]), [np.ones(count, np.uint8).tobytes()])


def test_a_large_request_is_read_by_a_helper_and_the_next_waits(bench: Bench) -> None:
    assert len(asked()) > LARGE
    bench.peer.send(request(INFER, asked(id="large")) + request(INFER, asked(1, id="small")))
    assert bench.server.begun == []
    bench.server.helpers.answer_next()
    (begun,) = bench.server.begun
    assert (begun.id, bytes(begun.data[0])) == ("large", b"\1" * COUNT)
    assert begun.header.sizes == [COUNT]
    begun.respond(answer(1))
    assert [body["id"] for _, body in bench.answers()] == ["large"]
    bench.server.begun[1].respond(answer(1))
    assert [body["id"] for _, body in bench.answers()] == ["small"]


def test_a_large_request_that_is_wrong(bench: Bench) -> None:
    assert bench.ask(asked(COUNT - 1)) == []
    bench.server.helpers.answer_next()
    ((status, body),) = bench.answers()
    assert (status, body["error"].split(" (")[0]) == (
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field",
    )
    assert bench.ask(asked(1)) == [] and len(bench.server.begun) == 1, "the connection goes on"


def test_how_many_strings_there_are_is_said_after_what_is_wrong_with_their_tensor(bench: Bench) -> None:
    path = "/v2/models/texts/infer"
    bench.ask(asked(COUNT - 1, "BYTES", id="x"), path=path)
    bench.server.helpers.answer_next()
    ((status, body),) = bench.answers()
    told = (
        f"[request id: x] expected {COUNT} string elements for inference input 'IN' for model 'texts', got {COUNT - 1}"
    )
    assert (status, body["error"]) == (400, told)
    bench.ask(asked(COUNT - 1, "BYTES"))
    bench.server.helpers.answer_next()
    ((status, body),) = bench.answers()
    assert (status, "data-type is 'BYTES', but model 'm' expects 'UINT8'" in body["error"]) == (400, True)


def test_nothing_is_read_for_a_model_that_there_is_not(bench: Bench) -> None:
    ((status, body),) = bench.ask(asked(), path="/v2/models/none/infer")
    assert (status, body) == (404, {"error": "Request for unknown model: 'none' is not found"})
    assert bench.server.helpers.waiting == []


@pytest.mark.parametrize("path", [INFER, "/v2/models/m/generate"])
def test_a_helper_that_fails(bench: Bench, path: str) -> None:
    bench.ask(asked() if path == INFER else json.dumps({"IN": [1] * COUNT}).encode(), path=path)
    bench.server.helpers.answer_next(Internal("it is gone"))
    assert bench.answers() == [(500, {"error": "it is gone"})]


def test_a_mistake_of_ours_after_a_helper(bench: Bench) -> None:
    bench.server.raises = ValueError("a mistake")
    bench.ask(asked())
    bench.server.helpers.answer_next()
    assert bench.answers() == [(500, {"error": Incident()})]


def test_a_client_that_goes_cancels_what_is_read_for_it(bench: Bench) -> None:
    bench.ask(asked())
    bench.peer.connection.connection_lost(None)
    assert (bench.server.helpers.cancelled, bench.server.helpers.waiting) == (1, [])


def test_a_body_that_unpacks_to_a_large_one(bench: Bench) -> None:
    packed = gzip.compress(asked(id="x"))
    assert len(packed) < LARGE
    bench.ask(packed, "Content-Encoding: gzip")
    assert bench.server.begun == bench.server.helpers.waiting == []
    bench.aside.do()
    bench.server.helpers.answer_next()
    (begun,) = bench.server.begun
    assert (begun.id, bytes(begun.data[0])) == ("x", b"\1" * COUNT)
    begun.respond(answer(1))
    bench.answers()
    bench.ask(gzip.compress(bytes(MAX_SIZE + 1)), "Content-Encoding: gzip")
    bench.aside.do()
    ((status, body),) = bench.answers()
    assert (status, f"exceeds the maximum allowed value of {MAX_SIZE} bytes" in body["error"]) == (400, True)


def test_a_large_answer_is_written_by_a_helper(bench: Bench) -> None:
    bench.ask(asked(1, id="x"))
    bench.server.begun[0].respond(answer(LARGE + 1))
    assert bench.answers() == []
    bench.server.helpers.answer_next()
    ((status, body),) = bench.answers()
    assert (status, body["id"], body["outputs"][0]["data"]) == (200, "x", [1] * (LARGE + 1))
    bench.ask(asked(1))
    bench.server.begun[1].respond(answer(LARGE))
    assert len(bench.answers()) == 1 and bench.server.helpers.waiting == []


def test_a_large_answer_that_cannot_be_written(bench: Bench) -> None:
    bench.ask(asked(1))
    bench.server.begun[0].respond(answer(LARGE + 1))
    bench.server.helpers.answer_next(Internal("it is gone"))
    assert bench.answers() == [(500, {"error": "it is gone"})]


def test_a_large_answer_for_a_client_that_is_gone(bench: Bench) -> None:
    bench.ask(asked(1))
    bench.server.begun[0].respond(answer(LARGE + 1))
    bench.peer.connection.connection_lost(None)
    bench.server.helpers.answer_next()
    assert bench.peer.transport.taken() == b""


def test_settings_are_small(bench: Bench) -> None:
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/repository/index", "/v2/repository/models/m/unload"):
        told = f"the body has {LARGE + 1} bytes, more than the {LARGE} that such a request may have"
        assert bench.ask(b" " * (LARGE + 1), path=path) == [(400, {"error": told})]
