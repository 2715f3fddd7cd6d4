"""Plain HTTP: base64, half precision, files and forms, asked of a running server."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL.Image
import pytest

from serving import IDENTITY, Serving, pbtxt, python_model, serving, strings

IMAGE = """
def execute(self, requests):
    answers = []
    for request in requests:
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        extra = pb_utils.get_input_tensor_by_name(request, "FACTOR")
        factor = 1 if extra is None else float(extra.as_numpy().ravel()[0])
        answers.append(pb_utils.InferenceResponse([
            pb_utils.Tensor("SHAPE", np.array(image.shape, np.int64)),
            pb_utils.Tensor("SUM", np.array([image.sum() * factor], np.float64)),
        ]))
    return answers
"""
IMAGE_CONFIG = """
backend: "python"
input [
  {{ name: "IMAGE" data_type: TYPE_UINT8 dims: [ {dims} ] }}
  {more}
]
output [ {{ name: "SHAPE" data_type: TYPE_INT64 dims: [ -1 ] }}, {{ name: "SUM" data_type: TYPE_FP64 dims: [ 1 ] }} ]
{rest}
"""
FACTOR = ', { name: "FACTOR" data_type: TYPE_FP32 dims: [ 1 ] optional: true }'


def picture(width: int, height: int, form: str = "PNG", seed: int = 5) -> tuple[Any, bytes]:
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(array).save(file, form)
    return array, file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("plain")
    models = folder / "models"
    python_model(models, "text", IDENTITY, pbtxt(batch=4, datatype="TYPE_STRING", dims="1"))
    python_model(models, "texts", IDENTITY, pbtxt(batch=0, more="", datatype="TYPE_STRING"))
    for name, datatype in (("fp16", "TYPE_FP16"), ("bf16", "TYPE_BF16"), ("octets", "TYPE_UINT8")):
        source = IDENTITY.replace(
            'pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()',
            'pb_utils.get_input_tensor_by_name(request, "INPUT0")',
        ).replace('pb_utils.Tensor("OUTPUT0", ', 'pb_utils.Tensor.from_dlpack("OUTPUT0", ')
        python_model(models, name, source, pbtxt(batch=4, datatype=datatype))
    config = IMAGE_CONFIG.format(dims="-1, -1, 3", more="", rest="max_batch_size: 4")
    python_model(models, "picture", IMAGE, config)
    python_model(models, "small", IMAGE, IMAGE_CONFIG.format(dims="3, 8, 8", more="", rest="max_batch_size: 0"))
    python_model(models, "scaled", IMAGE, IMAGE_CONFIG.format(dims="-1, -1, 3", more=FACTOR, rest="max_batch_size: 0"))
    factor = FACTOR.replace("optional: true", "")
    python_model(models, "pair", IMAGE, IMAGE_CONFIG.format(dims="-1, -1, 3", more=factor, rest="max_batch_size: 0"))
    with serving(models, folder / "log", "--http-json-half-precision=true") as running:
        yield running


def outputs(answer: tuple[int, dict[str, str], bytes]) -> dict[str, Any]:
    """The data of the outputs of an answer in JSON."""
    status, headers, body = answer
    assert status == 200, body
    assert headers["Content-Type"] == "application/json"
    return {output["name"]: output["data"] for output in json.loads(body)["outputs"]}


def refusal(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[2])["error"]


def body_of(reader: BinaryIO) -> bytes:
    """Read one reply; return its body."""
    length = 0
    while line := reader.readline().strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split()[1])
    return reader.read(length)


def asked(datatype: str, data: list[Any], shape: list[int], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": shape, "data": data}], **more}


# Base64


def test_bytes_there_and_back(server: Serving) -> None:
    data = [{"b64": "/wA="}, "text", {"b64": ""}]
    for way in (
        {"outputs": [{"name": "OUTPUT0", "parameters": {"base64": True}}]},
        {"parameters": {"base64_output": True}},
    ):
        answer = outputs(server.ask("POST", "/v2/models/texts/infer", asked("BYTES", data, [3], **way)))
        assert answer == {"OUTPUT0": [{"b64": "/wA="}, {"b64": "dGV4dA=="}, {"b64": ""}]}


def test_bytes_there_and_back_with_generate(server: Serving) -> None:
    body = {"INPUT0": [{"b64": "/wA="}], "parameters": {"base64_output": True}}
    assert server.json("POST", "/v2/models/texts/generate", body)["OUTPUT0"] == {"b64": "/wA="}
    _, _, events = server.ask("POST", "/v2/models/texts/generate_stream", {"INPUT0": "a", "base64_output": True})
    assert json.loads(events.removeprefix(b"data: "))["OUTPUT0"] == {"b64": "YQ=="}


def test_wrong_base64(server: Serving) -> None:
    answer = server.ask("POST", "/v2/models/texts/infer", asked("BYTES", ["a", {"b64": "abc"}], [2]))
    status, told = refusal(answer)
    assert status == 400
    assert told.startswith("element 1 of input 'INPUT0' is not valid base64: Incorrect padding.")
    status, told = refusal(server.ask("POST", "/v2/models/texts/generate", {"INPUT0": {"b64": "?"}}))
    assert (status, told.partition(":")[0]) == (400, "element 0 of input 'INPUT0' is not valid base64")


def test_a_request_that_comes_again_with_other_data(server: Serving) -> None:
    """Sent in one piece, so that the connection knows the second by its first bytes: it must mean what it says."""
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        reader = connection.makefile("rb")
        for parameters, wrap in (({"base64": True}, True), ({}, False), ({"base64": True}, True)):
            for element in (b"abc", b"xyz", b"abc", b"12"):
                raw = strings(element)
                size = {"binary_data_size": len(raw)}
                tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1], "parameters": size}
                output = {"name": "OUTPUT0", "parameters": parameters}
                head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
                lines = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head + raw)}\r\n\r\n"
                connection.sendall(
                    f"POST /v2/models/texts/infer HTTP/1.1\r\nHost: localhost\r\n{lines}".encode() + head + raw
                )
                data = json.loads(body_of(reader))["outputs"][0]["data"]
                assert data == [{"b64": base64.b64encode(element).decode()} if wrap else element.decode()]


# Half precision


@pytest.mark.parametrize(("model", "datatype"), [("fp16", "FP16"), ("bf16", "BF16")])
def test_half_precision_there_and_back(server: Serving, model: str, datatype: str) -> None:
    answer = server.ask("POST", f"/v2/models/{model}/infer", asked(datatype, [0.1, -2, 1e9], [1, 3]))
    data = outputs(answer)["OUTPUT0"]
    assert data == [0.1, -2.0, float("inf") if datatype == "FP16" else 1e9]
    assert server.json("POST", f"/v2/models/{model}/generate", {"INPUT0": [1.5, 2]})["OUTPUT0"] == [1.5, 2.0]


# Files


def test_a_file_is_an_element(server: Serving) -> None:
    for model in ("text", "texts"):
        for content_type in ("audio/wav", "IMAGE/png", "application/pdf; x=y"):
            answer = server.ask("POST", f"/v2/models/{model}/infer", b"any bytes", Content_Type=content_type)
            assert outputs(answer) == {"OUTPUT0": ["any bytes"]}


def test_a_file_is_bytes(server: Serving) -> None:
    assert outputs(server.ask("POST", "/v2/models/octets/infer", b"\1\2", Content_Type="image/png")) == {
        "OUTPUT0": [1, 2]
    }


def test_inputs_that_are_optional_may_stay_away(server: Serving) -> None:
    array, data = picture(3, 2)
    answer = server.ask("POST", "/v2/models/scaled/infer", data, Content_Type="image/png")
    assert outputs(answer) == {"SHAPE": [2, 3, 3], "SUM": [float(array.sum())]}


@pytest.mark.parametrize("size", [(3, 2), (400, 300)])
def test_an_image_is_pixels(server: Serving, size: tuple[int, int]) -> None:
    array, data = picture(*size)
    answer = server.ask("POST", "/v2/models/picture/infer", data, Content_Type="image/png")
    assert outputs(answer) == {"SHAPE": [1, size[1], size[0], 3], "SUM": [float(array.sum())]}


def test_a_fixed_size(server: Serving) -> None:
    array, data = picture(8, 8)
    answer = server.ask("POST", "/v2/models/small/infer", data, Content_Type="image/png")
    assert outputs(answer) == {"SHAPE": [3, 8, 8], "SUM": [float(array.sum())]}
    answer = server.ask("POST", "/v2/models/small/infer", picture(9, 8)[1], Content_Type="image/png")
    assert refusal(answer) == (
        400,
        "unexpected size of the image for input 'IMAGE': expected [3,8,8], got [3,8,9] (it is 9 wide and 8 high; "
        "images are not resized)",
    )


def test_what_cannot_be(server: Serving) -> None:
    def ask(model: str, **headers: str) -> tuple[int, str]:
        return refusal(server.ask("POST", f"/v2/models/{model}/infer", b"no", **headers))

    assert ask("none", Content_Type="image/png") == (404, "Request for unknown model: 'none' is not found")
    assert ask("picture", Content_Type="image/png")[1].startswith("the image for input 'IMAGE' can not be read")
    assert ask("picture", Content_Type="audio/wav")[1].startswith(
        "input 'IMAGE' is UINT8 [-1,-1,3], which takes no file"
    )
    assert ask("pair", Content_Type="image/png")[1].startswith(
        "a file as the request body needs a model with one input, or with one required input; the inputs of model "
        "'pair' are: 'IMAGE', 'FACTOR'. Send a form with a part for each (curl -F 'NAME=@file'), or JSON"
    )
    assert ask("text", Content_Type="image/png", Content_Encoding="gzip")[0] == 400
    assert ask("text", Content_Type="multipart/form-data")[1].startswith(
        "a body of type multipart/form-data needs a bou"
    )


@pytest.mark.parametrize(
    "content_type", ["application/octet-stream", "application/x-www-form-urlencoded", "text/plain"]
)
def test_other_types_mean_what_they_mean_to_triton(server: Serving, content_type: str) -> None:
    body = asked("BYTES", ["a"], [1])
    assert outputs(server.ask("POST", "/v2/models/texts/infer", body, Content_Type=content_type)) == {"OUTPUT0": ["a"]}


def test_the_header_of_binary_requests_comes_first(server: Serving) -> None:
    headers = {"Inference_Header_Content_Length": "0", "Content_Type": "image/png"}
    status, given, body = server.ask("POST", "/v2/models/text/infer", struct.pack("<I", 2) + b"hi", **headers)
    size = int(given["Inference-Header-Content-Length"])
    assert (status, body[size:]) == (200, strings(struct.pack("<I", 2) + b"hi"))


def test_answers_are_compressed_if_the_client_likes(server: Serving) -> None:
    headers = {"Content_Type": "image/png", "Accept_Encoding": "gzip"}
    status, given, _ = server.ask("POST", "/v2/models/picture/infer", picture(3, 3)[1], **headers)
    assert (status, given["Content-Encoding"]) == (200, "gzip")


def test_requests_in_one_connection_are_answered_in_their_order(server: Serving) -> None:
    """Sent all at once: while an image is decoded, whatever comes behind it waits."""
    host, port = server.http.split(":")
    sizes = [(300, 200), (2, 1), (500, 400)]
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for size in sizes:
            data = picture(*size)[1]
            head = "POST /v2/models/picture/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        reader = connection.makefile("rb")
        for width, height in sizes:
            assert json.loads(body_of(reader))["outputs"][0]["data"] == [1, height, width, 3]


# Forms


def curl(server: Serving, *arguments: str, path: str) -> Any:
    done = subprocess.run(
        ["curl", "-sS", *arguments, f"http://{server.http}{path}"], capture_output=True, timeout=20, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (b"POST /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 400 "),
        (b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n", b"HTTP/1.1 400 "),
        (b"POST /a HTTP/1.1\r\nHost: elsewhere\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 403 "),
    ],
)
def test_a_client_that_goes_on_sending_reads_the_refusal(server: Serving, wrong: bytes, expected: bytes) -> None:
    port = server.ports["HTTPService"]
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(wrong)
            client.recv(1, socket.MSG_PEEK)  # it is refused, and has not been read
            client.sendall(bytes(500_000))
            answer = b"".join(iter(lambda client=client: client.recv(65536), b""))  # type: ignore[misc]
        assert answer.startswith(expected) and b"Connection: close" in answer


def test_forms_as_curl_sends_them(server: Serving, tmp_path: Path) -> None:
    array, data = picture(20, 10)
    file = tmp_path / "cat.png"
    file.write_bytes(data)
    path = "/v2/models/scaled/infer"
    answer = curl(server, "-F", f"IMAGE=@{file}", "-F", "FACTOR=0.5", path=path)
    assert [output["data"] for output in answer["outputs"]] == [[10, 20, 3], [array.sum() * 0.5]]
    file.with_suffix(".wav").write_bytes(b"RIFF")
    answer = curl(server, "-F", f"INPUT0=@{file.with_suffix('.wav')}", path="/v2/models/texts/infer")
    assert answer["outputs"][0]["data"] == ["RIFF"]
    told = curl(server, "-F", f"IMAGE=@{file}", "-F", "FACTER=2", path=path)["error"]
    assert told == (
        "unexpected inference input 'FACTER' for model 'scaled'. Each part of a form must have the name of "
        "an input; the inputs are: 'IMAGE', 'FACTOR'"
    )
    told = curl(server, "-F", f"IMAGE=@{file}", "-F", f"IMAGE=@{file}", path=path)["error"]
    assert told == "[request id: <id_unknown>] input 'IMAGE' already exists in request"
    told = curl(server, "-F", "FACTOR=2", path=path)["error"]
    assert "missing required input(s) ['IMAGE']" in told
