"""Requests and responses in bytes."""

from __future__ import annotations

import json
from http.client import HTTPMessage

import numpy as np
import pytest

from nerite.client import ClientError, ModelDescription, TensorDescription
from nerite.client.connection import HttpAnswer
from nerite.client.tensors import HEADER_LENGTH, as_line, decode, encode
from nerite.transports.http import infer_request

MODEL = ModelDescription(
    "m",
    ("1",),
    "python",
    (TensorDescription("N", "INT32", (-1, 2)), TensorDescription("T", "BYTES", (1,))),
    (TensorDescription("OUT", "INT32", (-1, 2)),),
)


def answer(document: object, raw: bytes = b"", length: bool = True) -> HttpAnswer:
    head = json.dumps(document).encode()
    headers = HTTPMessage()
    if length:
        headers[HEADER_LENGTH] = str(len(head))
    return HttpAnswer(200, headers, bytearray(head + raw))


def test_a_request() -> None:
    parts, length = encode(MODEL, {"T": "hi", "N": [1, 2]}, ["OUT"], {"priority": 1})
    body = b"".join(parts)
    assert json.loads(body[:length]) == {
        "inputs": [
            {"name": "T", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            {"name": "N", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        ],
        "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
        "parameters": {"binary_data_output": True, "priority": 1},
    }
    assert body[length:] == b"\x02\0\0\0hi" + np.array([1, 2], "<i4").tobytes()


def test_an_input_that_the_model_does_not_have() -> None:
    with pytest.raises(ClientError, match=r"model 'm' has no input 'X'\. Its inputs: N, T"):
        encode(MODEL, {"X": 1}, (), {})


def test_a_response() -> None:
    outputs = [
        {"name": "A", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}},
        {"name": "B", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}},
        {"name": "C", "datatype": "BYTES", "shape": [2], "data": ["x", "y"]},
        {"name": "D", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}},
        {"name": "E", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
        {"name": "F", "datatype": "INT16", "shape": [0], "parameters": {"binary_data_size": 0}},
    ]
    found = decode(answer({"outputs": outputs}, b"\x01\0\x02\0" + b"\x01\0\0\0z" + b"\xc0\x3f"))
    assert {name: array.tolist() for name, array in found.items()} == {
        "A": [1, 2],
        "B": [[b"z"]],
        "C": [b"x", b"y"],
        "D": [1.5],
        "E": [[1, 2]],
        "F": [],
    }
    assert (found["D"].dtype, found["E"].dtype) == (np.float32, np.float32)
    found["A"][0] = 7


@pytest.mark.parametrize("document", ["text", {"no": "outputs"}, 3])
def test_an_answer_that_is_no_response(document: object) -> None:
    with pytest.raises(ClientError, match="is not an inference response"):
        decode(answer(document, length=False))


def test_a_request_as_a_line() -> None:
    model = ModelDescription(
        "m",
        (),
        "",
        (
            TensorDescription("NUMBERS", "FP16", (-1, 2)),
            TensorDescription("SHORT", "BF16", (1,)),
            TensorDescription("TEXTS", "BYTES", (-1,)),
        ),
        (),
    )
    inputs = {"NUMBERS": [[1, 2.5]], "SHORT": [0.5], "TEXTS": ["é\n", b"plain", b"\xff"]}
    line = as_line(model, inputs, ["OUT"], {"priority": 1})
    assert "\n" not in line
    assert json.loads(line) == {
        "inputs": [
            {"name": "NUMBERS", "datatype": "FP16", "shape": [1, 2], "data": [1.0, 2.5]},
            {"name": "SHORT", "datatype": "BF16", "shape": [1], "data": [0.5]},
            {"name": "TEXTS", "datatype": "BYTES", "shape": [3], "data": ["é\n", "plain", {"b64": "/w=="}]},
        ],
        "outputs": [{"name": "OUT"}],
        "parameters": {"priority": 1},
    }
    header, data = infer_request.read_recorded_request("m", line.encode())
    assert [spec.shape for spec in header.inputs] == [(1, 2), (1,), (3,)]
    assert bytes(data[1]) == b"\0\x3f"
    assert bytes(data[2]).endswith(b"\x01\0\0\0\xff")
    with pytest.raises(ClientError, match="has no input 'OTHER'"):
        as_line(model, {"OTHER": 1}, (), {})
