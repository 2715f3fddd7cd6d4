"""Requests that are large, unpack to much, do not come on or come in masses: refused, and others notice nothing."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faults import resident
from grpc_streams import Stream
from nerite.core.tensor import join_bytes
from nerite.wire.fields import nested_field as field
from nerite.wire.grpc_service import ModelInferRequest, ModelInferResponse
from raw_grpc import INFER, STREAM, RawGrpc, Watch, framed
from serving import IDENTITY, Serving, binary_request, eventually, pbtxt, python_model, serving

MB = 2**20
HELD_UP = 2.0
"""Seconds for which no other request may wait, however busy the machine is: without bounds it is ten and more."""
KEPT = 100 * MB
"""Bytes that the allocator may keep for the next time."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("arrivals")
    for name, datatype in (("floats", "TYPE_FP32"), ("ints", "TYPE_INT64"), ("bytes", "TYPE_UINT8")):
        python_model(folder / "models", name, IDENTITY, pbtxt(batch=0, more="", datatype=datatype))
    python_model(folder / "models", "texts", IDENTITY, pbtxt(batch=0, more="", datatype="TYPE_STRING"))
    with serving(folder / "models", folder / "log") as running:
        yield running


def zeros(size: int) -> bytes:
    """Return so many zeros, packed by repeating what a megabyte of them becomes. Nothing says where they end."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    first = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + again * (size // MB - 1)


def parameters(count: int) -> bytes:
    return b"".join(field(4, field(1, b"k%d" % number) + field(2, b"\x08\x01")) for number in range(count))


ATTACKS: dict[str, tuple[Callable[[], bytes], bool, int, str]] = {
    "64 MB of zeros, packed": (lambda: gzip.compress(bytes(64 * MB)), True, 13, "Unable to parse request"),
    "2 GB of zeros, packed": (lambda: zeros(2048 * MB), True, 8, "Received message larger than max (268435456) after"),
    "8 MB of field 0": (lambda: bytes(8 * MB), False, 13, "Unable to parse request"),
    "4 million raw contents": (lambda: b"\x3a\x00" * 4_000_000, False, 3, "most of them 'raw_input_contents'"),
    "4 million unknown fields": (lambda: b"\x08\x00" * 4_000_000, False, 3, "most of them unknown"),
    "4 million fields of an input": (lambda: field(5, b"\x08\x00" * 4_000_000), False, 3, "most of them in 'inputs'"),
    "300,000 parameters": (lambda: parameters(300_000), False, 3, "most of them 'parameters'"),
    "a shape of 4 million dimensions": (
        lambda: field(5, field(3, b"\x01" * 4_000_000)), False, 3, "'shape' has 4000000 elements, more than the 1024",
    ),
    "a name of 8 MB": (lambda: field(1, b"x" * 8 * MB), False, 3, "8388613 bytes besides its tensors, more than the"),
    "4 million strings": (
        lambda: field(1, b"texts") + field(5, field(2, b"BYTES") + field(5, b"\x42\x00" * 4_000_000)),
        False, 3, "texts",
    ),
    "4 million numbers that are not packed": (
        lambda: field(5, field(2, b"INT64") + field(5, b"\x18\x00" * 4_000_000)),
        False, 3, "in the contents of",
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ATTACKS)
def test_a_message_is_refused_and_others_do_not_wait(server: Serving, what: str) -> None:
    make, compressed, code, text = ATTACKS[what]
    message = make()
    client = RawGrpc(server)
    client.ask(b"")
    before = resident(server)
    with Watch(server) as watch:
        answer = client.ask(message, compressed=compressed)
    client.close()
    assert answer[0] == code and text in answer[1], answer
    assert watch.longest < HELD_UP
    assert watch.most_memory < before + 256 * MB + KEPT
    eventually(lambda: resident(server) < before + KEPT)


@pytest.mark.timeout(300)
def test_on_streams_too(server: Serving) -> None:
    """A stream goes on after what is wrong, and ends after what is too large."""
    client = RawGrpc(server)
    before = resident(server)
    with Watch(server) as watch:
        stream = client.begin(STREAM, grpc_encoding="gzip")
        client.send(stream, framed(gzip.compress(bytes(64 * MB)), compressed=True))
        client.send(stream, framed(b"\x3a\x00" * 2_000_000))
        client.send(stream, framed(zeros(2048 * MB), compressed=True), end=True)
        assert client.status(stream) == (0, "")
        stream = client.begin(STREAM)
        client.send(stream, b"\0" + (2**28 + 1).to_bytes(4) + b"x")
        code, text = client.status(stream)
    client.close()
    assert (code, text[:58]) == (8, "Received message larger than max (268435457 vs. 268435456)")
    assert watch.longest < HELD_UP
    eventually(lambda: resident(server) < before + KEPT)


@pytest.mark.timeout(120)
def test_a_body_over_http(server: Serving) -> None:
    head = b"POST /v2/models/floats/infer HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    body = zeros(1024 * MB)
    before = resident(server)
    host, port = server.http.split(":")
    with Watch(server) as watch, socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head % len(body) + body)
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400") and b"--http-max-input-size" in answer
    assert watch.longest < HELD_UP
    assert watch.most_memory < before + 64 * MB + KEPT
    eventually(lambda: resident(server) < before + KEPT)


def tensor(name: str, values: np.ndarray[Any, Any], datatype: str, **contents: Any) -> ModelInferRequest:
    given = {"name": "INPUT0", "datatype": datatype, "shape": values.shape, "contents": contents}
    return ModelInferRequest(model_name=name, inputs=[given])


def asked(server: Serving, message: ModelInferRequest, **options: Any) -> bytes:
    """Ask a client of gRPC's own; return the bytes of the output."""
    with grpc.insecure_channel(server.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(INFER, ModelInferRequest.SerializeToString, ModelInferResponse.FromString)
        raw: bytes = call(message, timeout=60, **options).raw_output_contents[0]
        return raw


@pytest.mark.parametrize("count", [3, 300_000])
def test_typed_contents_of_any_size(server: Serving, count: int) -> None:
    ints = np.random.default_rng(1).integers(-(2**40), 2**40, count)
    texts = [b"%d" % number for number in range(count)]
    floats = ints.astype(np.float32)
    assert asked(server, tensor("ints", ints, "INT64", int64_contents=ints)) == ints.tobytes()
    assert asked(server, tensor("floats", floats, "FP32", fp32_contents=floats)) == floats.tobytes()
    small = (ints % 256).astype(np.uint8)
    assert asked(server, tensor("bytes", small, "UINT8", uint_contents=small)) == small.tobytes()
    assert asked(server, tensor("texts", ints, "BYTES", bytes_contents=texts)) == join_bytes(texts)


def test_large_messages_that_are_packed(server: Serving) -> None:
    values = np.random.default_rng(2).integers(0, 100, 1_000_000).astype(np.float32)
    message = ModelInferRequest(
        model_name="floats",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": values.shape}],
        raw_input_contents=[values.tobytes()],
    )
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert asked(server, message, compression=compression) == values.tobytes()
    body, headers = binary_request(values)
    packed = gzip.compress(body, 1)
    status, _, answer = server.ask(
        "POST", "/v2/models/floats/infer", packed, Content_Encoding="gzip", **_named(headers)
    )
    assert status == 200
    assert answer.endswith(values.tobytes())


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in headers.items()}


def test_messages_of_a_stream_stay_in_order(server: Serving) -> None:
    """Also those that are read in a thread, because they unpack to much."""
    stream = Stream(server, compression_algorithm="gzip")
    sizes = [1, 500_000, 2, 300_000, 3, 4]
    for number, size in enumerate(sizes):
        given = grpcclient.InferInput("INPUT0", [size], "FP32")
        given.set_data_from_numpy(np.full(size, number, np.float32))
        stream.client.async_stream_infer("floats", [given], request_id=str(number))
    try:
        for number, size in enumerate(sizes):
            result, error = stream.came.get(timeout=30)
            assert error is None and result is not None
            assert result.get_response().id == str(number)
            assert result.as_numpy("OUTPUT0").tolist() == [number] * size
    finally:
        stream.close()


# With little room


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[Serving]:
    python_model(tmp_path / "models", "floats", IDENTITY, pbtxt(batch=0, more=""))
    flags = ("--grpc-max-message-size=1000000", "--max-bytes-in-flight=2000000", "--max-connections=8")
    patience = ("--grpc-upload-timeout=2", "--http-upload-timeout=2")
    with serving(tmp_path / "models", tmp_path / "log", *flags, *patience) as running:
        yield running


def refused(server: Serving, reason: str) -> float:
    return server.metrics()[f'nerite_arrivals_refused_total{{reason="{reason}"}}']


def closed(server: Serving, reason: str) -> float:
    return server.metrics()[f'nerite_connections_closed_total{{reason="{reason}"}}']


def test_a_message_that_is_too_large_for_the_flag(cramped: Serving) -> None:
    text = "Received message larger than max (1000001 vs. 1000000). Use --grpc-max-message-size to increase the limit."
    client = RawGrpc(cramped)
    stream = client.begin()
    client.send(stream, b"\0" + (1_000_001).to_bytes(4))  # nothing of it has to be sent
    assert client.status(stream) == (8, text)
    client.close()
    honest = grpcclient.InferenceServerClient(cramped.grpc)
    given = grpcclient.InferInput("INPUT0", [250_000], "FP32")
    given.set_data_from_numpy(np.zeros(250_000, np.float32))
    with pytest.raises(InferenceServerException, match="Use --grpc-max-message-size to increase") as error:
        honest.infer("floats", [given])
    assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    given = grpcclient.InferInput("INPUT0", [249_000], "FP32")
    given.set_data_from_numpy(np.zeros(249_000, np.float32))
    assert len(honest.infer("floats", [given]).as_numpy("OUTPUT0")) == 249_000
    honest.close()
    assert refused(cramped, "message_size") == 2


def test_uploads_that_do_not_come_on(cramped: Serving) -> None:
    client = RawGrpc(cramped)
    calls = [client.begin(), client.begin(), client.begin(STREAM)]
    for call in calls[1:]:
        client.send(call, b"\0" + (500_000).to_bytes(4) + bytes(1000))
    idle = client.begin(STREAM)
    for call in calls:
        assert client.status(call) == (
            4,
            "the message made no progress for 2 s. Use --grpc-upload-timeout to wait longer.",
        )
    assert idle not in client.ended
    client.close()
    host, port = cramped.grpc.split(":")
    for sent in (b"", b"PRI * HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\1\0\1\4\0\0\0\1x"):
        with socket.create_connection((host, int(port)), timeout=30) as silent:
            silent.sendall(sent)
            while silent.recv(65536):
                pass
    assert (refused(cramped, "stalled"), closed(cramped, "stalled")) == (3, 3)


def test_more_bytes_than_there_is_room_for(cramped: Serving) -> None:
    host, port = cramped.http.split(":")
    begun = b"POST /v2/models/floats/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as upload:
        upload.sendall(begun % 1_900_000 + bytes(1_500_000))
        eventually(lambda: cramped.metrics()["nerite_bytes_in_flight"] >= 1_500_000)
        status, headers, body = cramped.ask("POST", "/v2/models/floats/infer", bytes(800_000))
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "--max-bytes-in-flight" in json.loads(body)["error"]
        client = RawGrpc(cramped)
        code, text = client.ask(bytes(800_000))
        assert (code, "--max-bytes-in-flight" in text) == (8, True)
        client.close()
        assert small(cramped)
    eventually(lambda: cramped.metrics()["nerite_bytes_in_flight"] == 0)
    assert refused(cramped, "bytes_in_flight") == 2
    body, headers = binary_request(np.zeros(200_000, np.float32))
    assert cramped.ask("POST", "/v2/models/floats/infer", body, **_named(headers))[0] == 200


def small(server: Serving) -> bool:
    body, headers = binary_request(np.zeros(3, np.float32))
    return server.ask("POST", "/v2/models/floats/infer", body, **_named(headers))[0] == 200


class Idle:
    """Connections that are only open, or have begun a request."""

    def __init__(self, server: Serving, count: int, sent: bytes = b"") -> None:
        host, port = server.http.split(":")
        self._address = (host, int(port))
        self.sockets: list[socket.socket] = []
        self.open(count, sent)

    def open(self, count: int, sent: bytes = b"") -> None:
        for _ in range(count):
            self.sockets.append(socket.create_connection(self._address, timeout=30))
            with contextlib.suppress(ConnectionError):  # it may have been refused
                self.sockets[-1].sendall(sent)

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()


def test_idle_connections_make_room(cramped: Serving) -> None:
    with Idle(cramped, 50):
        for _ in range(3):
            assert small(cramped)
        client = RawGrpc(cramped)
        assert client.ask(b"")[0] == 5
        client.close()
        assert closed(cramped, "refused") == 0
        assert closed(cramped, "displaced") >= 40


def test_when_all_connections_are_busy_the_next_is_told(cramped: Serving) -> None:
    """Of many that are refused in a second, a few are told; the others are closed."""
    answers: list[tuple[int, dict[str, str], bytes]] = []
    goaways: list[Any] = []

    def answered(status: int) -> bool:
        with contextlib.suppress(ConnectionError):
            answers.append(cramped.ask("GET", "/v2/health/live"))
        return bool(answers) and answers[-1][0] == status

    def all_busy() -> bool:
        connections.open(2, b"GET /v2/health/l")
        return answered(503)

    def told_over_grpc() -> bool:
        client = RawGrpc(cramped)
        client.wait_for_the_end()
        client.close()
        goaways.append(client.goaway)
        return client.goaway is not None

    with Idle(cramped, 8, b"GET /v2/health/l") as connections:
        eventually(all_busy)
        _, headers, body = answers[-1]
        assert (headers["Retry-After"], headers["Connection"]) == ("1", "close")
        assert "--max-connections" in json.loads(body)["error"]
        eventually(told_over_grpc)
        assert goaways[-1].additional_data == b"the limit of open connections (--max-connections) is reached"
        # A request that does not come on is ended, and others have the place.
        eventually(lambda: answered(200))
        assert closed(cramped, "refused") >= 2


def test_connections_that_are_not_used(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "floats", IDENTITY, pbtxt(batch=0, more=""))
    with serving(tmp_path / "models", tmp_path / "log", "--connection-idle-timeout=1") as server:
        honest = grpcclient.InferenceServerClient(server.grpc)
        assert honest.is_server_live()
        raw = RawGrpc(server)
        with Idle(server, 2) as idle:
            for each in idle.sockets:
                assert each.recv(1) == b""
        raw.wait_for_the_end()
        raw.close()
        assert raw.goaway is not None and raw.goaway.error_code == 0
        eventually(lambda: closed(server, "idle") >= 4)
        assert honest.is_server_live()
        honest.close()
