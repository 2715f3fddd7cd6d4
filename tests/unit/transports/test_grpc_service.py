"""Where gRPC calls lead. What the methods answer is asked of a running server."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import hpack
import pytest

from doubles import Caller, Incident
from nerite.core.errors import Internal, NotFound
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.http2 import RequestHeaders
from nerite.routes.table import RouteTable
from nerite.transports.access import AccessKeys, Lock
from nerite.transports.grpc.methods import GrpcAdministration
from nerite.transports.grpc.service import GrpcService
from nerite.transports.limits import TransportLimits
from nerite.wire.grpc_service import ModelInferRequest, ModelStreamInferResponse

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


class FakeServer:
    """Offers no memory, and has no models."""

    routes = RouteTable()

    def signature_of(self, request: InferenceRequest) -> None:
        return None

    def receive_buffer(self, model: str, version: str, size: int, data_at: int) -> memoryview | None:
        return None

    def request(self, header: RequestHeader, data: Any, sink: Any, arrived_ns: int, id: str) -> InferenceRequest:
        return InferenceRequest(header, data, sink, arrived_ns, id)

    def find(self, model: str, version: str, decoupled: str) -> object:
        if model == "none":
            raise NotFound("Request for unknown model: 'none' is not found")
        return object()


class FakeCall:
    def __init__(self) -> None:
        self.failures: list[dict[bytes, bytes]] = []

    def fail(self, block: bytes) -> None:
        self.failures.append(dict(hpack.Decoder().decode(block, raw=True)))


def target(path: str, method: str = "POST", content_type: str = "application/grpc", **fields: str) -> Any:
    server: Any = FakeServer()
    service = GrpcService(
        server,
        GrpcAdministration(server).handler,
        TransportLimits(),
        max_message=2**28,
        locks={"health": Lock("triton-grpc-protocol-key", AccessKeys([b"secret"]))},
    )
    pseudo = {b":method": method.encode(), b":path": path.encode()}
    listed = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in fields.items()}}
    headers = RequestHeaders(pseudo, tuple((name.encode(), value.encode()) for name, value in listed.items()), -1)
    found = service.target(headers)
    assert headers.memo is found
    return found


def refused(found: Any) -> dict[bytes, bytes]:
    assert found.refusal is not None
    return dict(hpack.Decoder().decode(found.refusal, raw=True))


def test_what_is_no_grpc() -> None:
    assert refused(target(INFER, method="GET")) == {b":status": b"415"}
    assert refused(target(INFER, content_type="application/json")) == {b":status": b"415"}
    assert target(INFER, content_type="application/grpc+proto").refusal is None


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "text/plain;charset=UTF-8", "multipart/form-data", "application/x-www-form-urlencoded"],
)
def test_what_a_browser_sends_without_asking_is_no_grpc(content_type: str) -> None:
    assert refused(target(INFER, content_type=content_type, origin="https://evil.example")) == {b":status": b"415"}


def test_a_preflight_is_not_granted() -> None:
    asked = refused(
        target(INFER, method="OPTIONS", origin="https://evil.example", access_control_request_method="POST")
    )
    assert asked == {b":status": b"415"}


def test_a_method_that_there_is_not() -> None:
    assert refused(target("/inference.GRPCInferenceService/Frob"))[b"grpc-status"] == b"12"


def test_a_method_behind_a_key() -> None:
    fields = refused(target(LIVE))
    assert fields[b"grpc-status"] == b"14"
    assert fields[b"grpc-message"] == b"This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert refused(target(LIVE, triton_grpc_protocol_key="wrong"))[b"grpc-status"] == b"14"
    assert target(LIVE, triton_grpc_protocol_key="secret").refusal is None
    assert target(INFER).refusal is None


def test_a_compression_that_there_is_not() -> None:
    assert refused(target(INFER, grpc_encoding="snappy"))[b"grpc-status"] == b"12"
    for encoding in ("identity", "gzip", "deflate"):
        assert target(INFER, grpc_encoding=encoding).refusal is None


def test_how_long_a_client_waits() -> None:
    assert target(INFER).timeout is None
    assert target(INFER, grpc_timeout="250m").timeout == 0.25
    assert target(INFER, grpc_timeout="soon").timeout is None


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
@pytest.mark.parametrize("path", [INFER, "/inference.GRPCInferenceService/ServerMetadata"])
def test_an_announced_message_costs_nothing_before_it_comes(path: str) -> None:
    before = resident()
    room = target(path).receive_buffer(memoryview(b""), 2**31 - 1)
    assert (len(room), room.readonly) == (2**31 - 1, False)
    assert resident() - before < 100_000_000


def test_an_answer_that_cannot_be_written_is_still_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    call: Any = FakeCall()
    request = InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0)
    response = InferenceResponse(ResponseHeader("m", "1", [], {"beyond": 2**70}))
    target(INFER).answer(call, request, response)
    assert call.failures[0][b"grpc-status"] == b"13"
    assert call.failures[0][b"grpc-message"] == Incident()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_answer_on_a_stream_that_cannot_be_written_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    stream = target("/inference.GRPCInferenceService/ModelStreamInfer").stream
    assert stream is not None
    request = InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0, "me")
    response = InferenceResponse(ResponseHeader("m", "1", [], {"beyond": 2**70}))
    (framed,) = stream.write(request, response, True)
    told = ModelStreamInferResponse.FromString(bytes(framed)[5:])
    assert told.error_message == Incident()
    assert told.infer_response.id == "me"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("none", b"Request for unknown model: 'none' is not found"),
        ("m", b"unable to find data for input tensor 'IN' for model 'm' in request."),
        ("", b"unable to find data for input tensor 'IN' for model '' in request."),
    ],
)
def test_a_model_that_there_is_not_comes_before_what_is_wrong_with_the_question(model: str, told: bytes) -> None:
    call: Any = FakeCall()
    message = ModelInferRequest(model_name=model, inputs=[{"name": "IN"}]).SerializeToString()
    target(INFER).start(call, memoryview(bytes(5) + message))
    assert call.failures[0][b"grpc-message"] == told


def test_a_refusal_on_a_stream_does_not_repeat_an_id_that_is_too_long() -> None:
    stream = target("/inference.GRPCInferenceService/ModelStreamInfer").stream
    for request_id, told in (("me", "me"), ("x" * 1025, "")):
        (framed,) = stream.write_refusal(request_id, NotFound("nothing"))
        assert ModelStreamInferResponse.FromString(bytes(framed)[5:]).infer_response.id == told


@pytest.mark.parametrize("value", [b"gr\xfcn", b"gr\xc3\xbcn"])
def test_metadata_that_is_passed_on_is_utf8(value: bytes) -> None:
    server: Any = FakeServer()
    service = GrpcService(
        server,
        GrpcAdministration(server).handler,
        TransportLimits(),
        max_message=2**28,
        locks={},
        forward_pattern=re.compile("x-.*"),
    )
    fields = ((b"content-type", b"application/grpc"), (b"x-colour", value))
    found: Any = service.target(RequestHeaders({b":method": b"POST", b":path": INFER.encode()}, fields, -1))
    if value == "grün".encode():
        assert found.refusal is None
    else:
        assert refused(found)[b"grpc-status"] == b"3"
        assert refused(found)[b"grpc-message"] == b"header 'x-colour' is not valid UTF-8 at character 2"


def test_bytes_that_are_no_message() -> None:
    call: Any = FakeCall()
    target(INFER).start(call, memoryview(bytes(5) + b"\x0a\x04none\xff"))
    assert call.failures[0][b"grpc-message"] == b"Unable to parse request"


def test_a_failure_is_passed_on() -> None:
    call: Any = FakeCall()
    request = InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0)
    target(INFER).answer(call, request, InferenceResponse.failed(Internal("why")))
    assert call.failures[0][b"grpc-message"] == b"why"
