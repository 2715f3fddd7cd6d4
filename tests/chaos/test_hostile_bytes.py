"""Bytes that no honest client sends: every one of them is answered or hung up on, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nerite.wire.grpc_service import ModelInferRequest
from serving import IDENTITY, IN_PROCESS, Serving, pbtxt, python_model, serving

ROUNDS = 300
SLOW = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("hostile")
    python_model(folder / "models", "identity", IDENTITY)
    python_model(folder / "models", "text", IDENTITY, pbtxt(datatype="TYPE_STRING", parameters=IN_PROCESS))
    with serving(folder / "models", folder / "log") as running:
        yield running
        assert "Traceback" not in running.text
        assert running.workers().keys() == {"identity_0_0"}


def alive(server: Serving) -> None:
    assert server.infer("identity", [1.0]) == [1.0]


def send(address: str, data: bytes, chunks: int = 1, patience: float = 5.0) -> bytes:
    """Send bytes, in pieces; return what comes back until the server closes, or falls silent for ``patience``."""
    host, port = address.split(":")
    answer = b""
    # The server may hang up at any time, and a pipe that breaks meanwhile is as good an answer as any.
    with (
        socket.create_connection((host, int(port)), timeout=5) as connection,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        step = max(1, len(data) // chunks)
        for at in range(0, len(data), step):
            connection.sendall(data[at : at + step])
        connection.settimeout(patience)
        while piece := connection.recv(65536):
            answer += piece
    return answer


def http(path: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    lines += f"Content-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n".encode() + body


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` with a few things wrong."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(raw)) if raw else 0
        what = rng.randrange(4)
        if what == 0 and raw:
            raw[at] = rng.randrange(256)
        elif what == 1:
            raw[at:at] = rng.randbytes(rng.randint(1, 8))
        elif what == 2:
            del raw[at : at + rng.randint(1, 8)]
        else:
            raw[at : at + 4] = struct.pack(">I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 65536)))
    return bytes(raw)


BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}).encode()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def grpc_session() -> bytes:
    """Return a whole honest gRPC session: preface, settings, one call."""
    import hpack

    message = ModelInferRequest(
        model_name="identity",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2]}],
        raw_input_contents=[struct.pack("<2f", 1.0, 2.0)],
    ).SerializeToString()
    block = hpack.Encoder().encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "x"),
            (":path", "/inference.GRPCInferenceService/ModelInfer"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
    )
    data = b"\0" + len(message).to_bytes(4, "big") + message

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    return PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, data)


@pytest.mark.timeout(120)
def test_random_bytes_on_both_ports(server: Serving) -> None:
    rng = random.Random(1)
    for _ in range(ROUNDS // 3):
        for address in (server.http, server.grpc):
            send(address, rng.randbytes(rng.choice((1, 9, 24, 200, 5000))), rng.randint(1, 4), 0.02)
    alive(server)


@pytest.mark.timeout(120)
def test_mutated_http_requests(server: Serving) -> None:
    rng = random.Random(2)
    whole = http("/v2/models/identity/infer", BODY)
    for _ in range(ROUNDS):
        send(server.http, mutated(rng, whole), rng.randint(1, 3), 0.02)
    alive(server)


@pytest.mark.timeout(120)
def test_mutated_grpc_sessions(server: Serving) -> None:
    rng = random.Random(3)
    whole = grpc_session()
    for number in range(ROUNDS):
        # Half of them keep the preface, to come further.
        broken = PREFACE + mutated(rng, whole[len(PREFACE) :]) if number % 2 else mutated(rng, whole)
        send(server.grpc, broken, rng.randint(1, 3), 0.02)
    alive(server)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("FP32") | st.just("INPUT0"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ("inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "binary_data_size")
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@SLOW
@given(document=JSON, model=st.sampled_from(("identity", "text")))
def test_any_json(server: Serving, document: object, model: str) -> None:
    answer = send(server.http, http(f"/v2/models/{model}/infer", json.dumps(document).encode()))
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert answer[9:12] in (b"200", b"400", b"500"), answer


@SLOW
@given(
    shape=st.lists(st.integers(-2, 2**40), max_size=4),
    datatype=st.sampled_from(("FP32", "BYTES", "INT64", "BF16", "NONE", "")),
    size=st.integers(-5, 200),
    data=st.binary(max_size=100),
    head=st.integers(-5, 400) | st.none(),
    model=st.sampled_from(("identity", "text")),
)
def test_any_binary_body(
    server: Serving, shape: list[int], datatype: str, size: int, data: bytes, head: int | None, model: str
) -> None:
    text = json.dumps(
        {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}]}
    ).encode()
    length = len(text) if head is None else head
    request = http(f"/v2/models/{model}/infer", text + data, f"Inference-Header-Content-Length: {length}")
    answer = send(server.http, request)
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert answer[9:12] in (b"200", b"400", b"500"), answer


@SLOW
@given(
    message=st.builds(
        lambda shape, datatype, raw, name, request_id: ModelInferRequest(
            model_name=name,
            id=request_id,
            inputs=[{"name": "INPUT0", "datatype": datatype, "shape": shape}],
            raw_input_contents=raw,
        ).SerializeToString(),
        st.lists(st.integers(-2, 2**40), max_size=3),
        st.sampled_from(("FP32", "BYTES", "INT8", "BF16", "")),
        st.lists(st.binary(max_size=40), max_size=3),
        st.sampled_from(("identity", "text", "")),
        st.text(max_size=4),
    ),
    damage=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_any_grpc_message(server: Serving, message: bytes, damage: int, seed: int) -> None:
    import grpc

    if damage == 0 and message:
        message = mutated(random.Random(seed), message)
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message, timeout=5)
        except grpc.RpcError as error:
            codes = grpc.StatusCode
            allowed = (codes.INVALID_ARGUMENT, codes.NOT_FOUND, codes.INTERNAL)
            assert error.code() in allowed, error


def test_still_alive(server: Serving) -> None:
    alive(server)
    metrics = server.metrics()
    assert metrics['nv_inference_pending_request_count{model="identity",version="1"}'] == 0
    assert metrics['nv_inference_pending_request_count{model="text",version="1"}'] == 0
