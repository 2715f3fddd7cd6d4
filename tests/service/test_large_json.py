"""JSON of any size and content: it is answered or refused, others are answered meanwhile, and the memory comes back."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.core import memory
from process_family import helpers_of
from serving import IDENTITY, IN_PROCESS, PATIENCE, OneReader, Serving, eventually, pbtxt, python_model, serving

MB = 1 << 20
LATEST = 1.0
"""Seconds in which others are answered, though tests keep the machine busy."""
REPEATS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        for number in range(3):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values + number)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ASKING = """
import http.client, select, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=300)
longest = 0.0
while True:
    began = time.monotonic()
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().read() == b""
    if not longest:
        print("begun", flush=True)
    longest = max(longest, time.monotonic() - began)
    if select.select([sys.stdin], [], [], 0.005)[0]:
        print(longest)
        break
"""
"""A program that asks whether the server is live until its input ends, and tells the longest time that it waited."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("large_json")
    models = folder / "models"
    python_model(models, "numbers", IDENTITY)
    python_model(models, "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(models, "texts", IDENTITY, pbtxt(datatype="TYPE_STRING"))
    python_model(models, "repeats", REPEATS, pbtxt(batch=0, more="model_transaction_policy { decoupled: true }"))
    flags = ("--model-control-mode=explicit", "--load-model=*", "--model-load-files=any")
    with serving(models, folder / "log", *flags) as running:
        yield running


@contextmanager
def others_are_answered(server: Serving) -> Iterator[None]:
    """Ask all the time whether the server is live; fail if an answer was late."""
    command = [sys.executable, "-c", ASKING, str(server.ports["HTTPService"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        assert asking.stdout.readline() == "begun\n"
        try:
            yield
        finally:
            asking.stdin.close()
            longest = float(asking.stdout.readline())
    assert longest < LATEST


def infer(data: bytes, shape: list[int], datatype: str = "FP32") -> bytes:
    """Return an infer request whose data is this JSON."""
    name, sizes = datatype.encode(), json.dumps(shape).encode()
    return b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":%b,"data":%b}]}' % (name, sizes, data)


def repeated(unit: bytes, size: int = 4 * MB) -> bytes:
    """Return elements, each with its comma, of about so many bytes."""
    return unit * (size // len(unit))


NUMBERS, TEXTS = "/v2/models/numbers/infer", "/v2/models/texts/infer"
TENSOR = b'{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}'
PARSER = "failed to parse the request JSON buffer: "
SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"
TOO_DEEP = "JSON nesting depth exceeds maximum allowed limit (100)"
REFUSED = {
    "nested, and more": (NUMBERS, infer(b"[" + b"[" * 90 + b"1" + b"]" * 90 + repeated(b",1") + b"]", [1, 1]), SHAPE),
    "too deep": (NUMBERS, infer(b"[" * 4 * MB, [1, 1]), TOO_DEEP),
    "cut off": (NUMBERS, infer(b"[" + repeated(b"1,"), [1, 1])[:-3], PARSER + "Invalid value. at "),
    "NaN, and no end": (NUMBERS, infer(b"[NaN" + repeated(b",1"), [1, 1]), PARSER + "Missing a comma or ']' after"),
    "an escape": (TEXTS, infer(b"[" + repeated(b'"\\n",') + b'"\\x"]', [1, 1]), PARSER + "Invalid escape character"),
    "half a pair": (TEXTS, infer(b'["\\ud83d"' + repeated(b',""') + b"]", [1, 1]), PARSER + "The surrogate pair in"),
    "a number": (NUMBERS, infer(b"[" + repeated(b"1e300,") + b"1e309]", [1, 1]), PARSER + "Number too big to be"),
    "objects": (NUMBERS, infer(b"[" + repeated(b"{},") + b"1]", [1, 4 * MB // 3 + 1]), "attempt to access JSON non-n"),
    "strings": (
        TEXTS,
        infer(b"[" + repeated(b'"",') + b'""]', [1, 1], "BYTES"),
        "unexpected number of string",
    ),
    "bytes": (TEXTS, infer(b"[" + repeated(b'{"b64":""},') + b'""]', [1, 9], "BYTES"), "unexpected number of string"),
    "inputs": (NUMBERS, b'{"inputs":[' + repeated(TENSOR + b",") + TENSOR + b"]}", "'inputs' has "),
    "outputs": (
        NUMBERS,
        b'{"inputs":[' + TENSOR + b'],"outputs":[' + repeated(b'{"name":"OUTPUT0"},') + b"{}]}",
        "'outputs' has ",
    ),
    "parameters": (
        NUMBERS,
        b'{"inputs":[%b],"parameters":%b}' % (TENSOR, json.dumps({str(n): n for n in range(300_000)}).encode()),
        "'parameters' has 300000 entries, more than the 1024 that a request may have",
    ),
    "dimensions": (NUMBERS, infer(b"[1]", [10**18] * 200_000), "'shape' of input 'INPUT0' has 200000 entries"),
    "no such model": ("/v2/models/none/infer", infer(b"[" + repeated(b"[],") + b"1]", [1, 1]), "unknown model: 'none'"),
    "generate": (
        "/v2/models/numbers/generate",
        b'{"INPUT0":[NaN' + repeated(b",[]") + b"]",
        PARSER + "Missing a comma",
    ),
    "generate's parameters": (
        "/v2/models/numbers/generate",
        json.dumps({"INPUT0": 1, **{str(n): n for n in range(300_000)}}).encode(),
        "the body has 300001 entries, more than the 1025 that a request may have",
    ),
    "a setting": ("/v2/logging", b"[" + repeated(b"[],") + b"1]", "more than the 131072 that such a request may have"),
    "the index": ("/v2/repository/index", b"[" + repeated(b"[],") + b"1]", "more than the 131072 that such a request"),
    "a region": ("/v2/systemsharedmemory/region/r/register", b"[" + repeated(b"[],") + b"1]", "more than the 131072"),
    "a load": (
        "/v2/repository/models/x/load",
        b'{"parameters":{"config":1},"x":[' + repeated(b"[],") + b"1]}",
        "'config'",
    ),
}
"""Path, body, and what is said to be wrong."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_holds_nobody_up(server: Serving, what: str) -> None:
    path, body, told = REFUSED[what]
    with others_are_answered(server):
        status, _, said = server.ask("POST", path, body)
    assert (status >= 400, told in said.decode()) == (True, True), (status, said)


FLOATS = np.random.default_rng(0).random((1, 300_000), np.float32)
NOT_ALL_NUMBERS = FLOATS.copy()
NOT_ALL_NUMBERS[0, ::1000] = np.nan
NOT_ALL_NUMBERS[0, 1::1000] = -np.inf
WORDS = [f"wört {number}" for number in range(200_000)]


def asked(values: Any, shape: list[int], datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": shape, "data": values}], **more}


@pytest.mark.parametrize("model", ["numbers", "within"])
@pytest.mark.parametrize("array", [FLOATS, NOT_ALL_NUMBERS, FLOATS[:, :1]], ids=["numbers", "not all", "one"])
@pytest.mark.parametrize("nested", [False, True])
def test_numbers_come_back(server: Serving, model: str, array: np.ndarray[Any, Any], nested: bool) -> None:
    values = array.tolist() if nested else array.reshape(-1).tolist()
    body = asked(values, list(array.shape), unknown=["x"] * 40_000)
    with others_are_answered(server):
        (output,) = server.json("POST", f"/v2/models/{model}/infer", body)["outputs"]
    np.testing.assert_array_equal(np.array(output["data"], np.float32), array.reshape(-1))
    assert output["shape"] == list(array.shape)


def test_strings_come_back(server: Serving) -> None:
    with others_are_answered(server):
        (output,) = server.json("POST", TEXTS, asked(WORDS, [1, len(WORDS)], "BYTES"))["outputs"]
    assert output["data"] == WORDS


def test_bytes_come_back(server: Serving) -> None:
    values = [{"b64": base64.b64encode(number.to_bytes(3)).decode()} for number in range(100_000)]
    with others_are_answered(server):
        body = asked(values, [1, len(values)], "BYTES", parameters={"base64_output": True})
        (output,) = server.json("POST", TEXTS, body)["outputs"]
    assert output["data"] == values


def test_bytes_that_are_no_text_come_back(server: Serving) -> None:
    body = infer(b'["\xff"' + b',"\xfe\xff"' * 99_999 + b"]", [1, 100_000], "BYTES")
    with others_are_answered(server):
        status, _, said = server.ask("POST", TEXTS, body)
    assert status == 200 and said.count(b'"\xfe\xff"') == 99_999


def test_a_text_part_before_binary_tensors(server: Serving) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": list(FLOATS.shape)}
    raw = FLOATS.tobytes()
    head = json.dumps(
        {"id": "x", "inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}], "other": ["x"] * 100_000}
    ).encode()
    status, _, said = server.ask("POST", NUMBERS, head + raw, Inference_Header_Content_Length=str(len(head)))
    answer = json.loads(said)
    assert (status, answer["id"]) == (200, "x")
    np.testing.assert_array_equal(np.array(answer["outputs"][0]["data"], np.float32), FLOATS.reshape(-1))
    refused = server.ask("POST", NUMBERS, head + raw[:-4], Inference_Header_Content_Length=str(len(head)))
    assert refused[0] == 400 and b"expecting 4 additional bytes for model 'numbers'" in refused[2]


@pytest.mark.parametrize("answer", ["identity", "gzip"])
def test_compressed_bodies_and_answers(server: Serving, answer: str) -> None:
    body = gzip.compress(json.dumps(asked(FLOATS.tolist(), list(FLOATS.shape))).encode(), 1)
    with others_are_answered(server):
        status, headers, said = server.ask("POST", NUMBERS, body, Content_Encoding="gzip", Accept_Encoding=answer)
    assert (status, headers.get("Content-Encoding", "identity")) == (200, answer)
    plain = gzip.decompress(said) if answer == "gzip" else said
    np.testing.assert_array_equal(np.array(json.loads(plain)["outputs"][0]["data"], np.float32), FLOATS.reshape(-1))


def test_a_small_body_that_unpacks_to_a_large_one_holds_nobody_up(server: Serving) -> None:
    body = gzip.compress(infer(b"[" + b"[]," * 5_000_000 + b"1]", [1, 1]), 1)
    assert len(body) < 131_072
    with others_are_answered(server):
        status, _, said = server.ask("POST", NUMBERS, body, Content_Encoding="gzip")
    assert (status, json.loads(said)["outputs"][0]["data"]) == (200, [1.0])
    beyond = gzip.compress(b" " * (65 * MB))
    status, _, said = server.ask("POST", NUMBERS, beyond, Content_Encoding="gzip")
    assert (status, b"Decompressed data size exceeds the maximum allowed value" in said) == (400, True)


def test_generate(server: Serving) -> None:
    values = list(range(200_000))
    with others_are_answered(server):
        answer = server.json("POST", "/v2/models/within/generate", {"INPUT0": values, "id": "x", "other": 1})
    assert (answer["id"], answer["OUTPUT0"]) == ("x", values)


def test_events_that_are_large_come_in_their_order(server: Serving) -> None:
    values = [float(number) for number in range(100_000)]
    with others_are_answered(server):
        status, _, said = server.ask("POST", "/v2/models/repeats/generate_stream", {"INPUT0": values})
    events = [json.loads(event.removeprefix(b"data: ")) for event in said.split(b"\n\n") if event]
    assert status == 200
    assert [event["OUTPUT0"][:2] for event in events] == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert all(len(event["OUTPUT0"]) == len(values) for event in events)


def test_a_part_of_a_form_may_be_long(server: Serving) -> None:
    text = json.dumps(FLOATS.reshape(-1).tolist()).encode()
    form = b'--x\r\nContent-Disposition: form-data; name="INPUT0"\r\n\r\n' + text + b"\r\n--x--\r\n"
    with others_are_answered(server):
        status, _, said = server.ask("POST", NUMBERS, form, Content_Type="multipart/form-data; boundary=x")
    assert status == 200
    np.testing.assert_array_equal(np.array(json.loads(said)["outputs"][0]["data"], np.float32), FLOATS.reshape(-1))


def test_a_form_of_very_many_parts_is_refused(server: Serving) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="INPUT0"\r\n\r\n1\r\n' * 100_000 + b"--x--\r\n"
    with others_are_answered(server):
        status, _, said = server.ask("POST", NUMBERS, form, Content_Type="multipart/form-data; boundary=x")
    assert (status, json.loads(said)) == (400, {"error": "the form has more than 1024 parts"})


def test_a_load_may_bring_large_files(server: Serving) -> None:
    program = (
        "import os\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n    def execute(self, requests):\n"
        "        size = os.path.getsize(os.path.join(os.path.dirname(__file__), 'weights'))\n"
        "        answer = pb_utils.Tensor('OUTPUT0', np.array([size], np.float32))\n"
        "        return [pb_utils.InferenceResponse([answer]) for _ in requests]\n"
    )
    config = {
        "backend": "python",
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    files = {"1/model.py": program.encode(), "1/weights": bytes(3 * MB)}
    encoded = {f"file:{name}": base64.b64encode(content).decode() for name, content in files.items()}
    with others_are_answered(server):
        status, _, said = server.ask(
            "POST", "/v2/repository/models/brought/load", {"parameters": {"config": json.dumps(config), **encoded}}
        )
    assert status == 200, said
    answer = server.json("POST", "/v2/models/brought/infer", asked([1], [1]))
    assert answer["outputs"][0]["data"] == [3 * MB]


def test_requests_of_one_connection_are_answered_in_their_order(server: Serving) -> None:
    large = json.dumps(asked(FLOATS.tolist(), list(FLOATS.shape), id="large")).encode()
    small = json.dumps(asked([1], [1, 1], id="small")).encode()
    head = "POST /v2/models/numbers/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    sent = b"".join((head % len(body)).encode() + body for body in (large, small, large, small))
    with (
        socket.create_connection(("127.0.0.1", server.ports["HTTPService"]), timeout=PATIENCE) as connection,
        ThreadPoolExecutor(1) as sending,
    ):
        sending.submit(connection.sendall, sent)
        reader = OneReader(connection)
        ids = []
        for _ in range(4):
            answer = http.client.HTTPResponse(reader)  # type: ignore[arg-type]  # needs only makefile
            answer.begin()
            ids.append(json.loads(answer.read())["id"])
    assert ids == ["large", "small", "large", "small"]


def test_memory_comes_back(server: Serving) -> None:
    def taken() -> int:
        """Return the bytes of the server, and of its helpers."""
        return sum(map(memory.memory_of, [server.process.pid, *helpers_of(server.process.pid)]))

    body = infer(b"[" + repeated(b"{},", 24 * MB) + b"1]", [1, 1])
    server.ask("POST", NUMBERS, body)
    before = taken()
    for _ in range(4):
        with others_are_answered(server):
            assert server.ask("POST", NUMBERS, body)[0] == 500
    eventually(lambda: taken() - before < 60 * MB)


def test_a_client_that_goes_ends_the_work_for_it(server: Serving) -> None:
    body = infer(b"[" + repeated(b"{},", 60 * MB) + b"1]", [1, 1])

    def busy() -> set[int]:
        return {pid for pid in helpers_of(server.process.pid) if memory.memory_of(pid) > 200 * MB}

    head = f"POST {NUMBERS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports["HTTPService"]), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        eventually(lambda: bool(busy()))
        found = busy()
    eventually(lambda: found.isdisjoint(helpers_of(server.process.pid)))
    assert server.infer("numbers", [1.0]) == [1.0]


def test_the_end_of_a_server_waits_for_what_is_being_read(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    body = infer(b"[" + repeated(b"0.5,", 12 * MB) + b"1]", [1, 12 * MB // 4 + 1])
    head = f"POST /v2/models/within/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(tmp_path / "models", tmp_path / "log") as running:
        assert not helpers_of(running.process.pid), "a server that has read nothing large has no helpers"
        with socket.create_connection(("127.0.0.1", running.ports["HTTPService"]), timeout=PATIENCE) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: helpers_of(running.process.pid) != [])
            running.process.send_signal(signal.SIGTERM)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, len(json.loads(answer.read())["outputs"][0]["data"])) == (200, 12 * MB // 4 + 1)
        running.process.wait(PATIENCE)
