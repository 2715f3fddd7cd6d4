"""Infer responses over HTTP, to the byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller
from http_peer import replies
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import HTTP_REPLIES
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureOutput
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.http import infer_response, json_tensors

SIGNATURE = Signature("M", 8, [], [SignatureOutput("SCORES", dtypes.FP32, (3,), ("cat", "dog"))])
FP32 = TensorSpec("X", dtypes.FP32, (1, 2))
FP32_DATA = np.array([1.5, 2.0], np.float32).tobytes()
TEXT = TensorSpec("T", dtypes.BYTES, (1,))
TEXT_DATA = join_bytes(["é"])
SCORES = TensorSpec("SCORES", dtypes.FP32, (1, 3))
SCORES_DATA = np.array([1.0, 3.0, 2.0], np.float32).tobytes()


def asked(*outputs: RequestedOutput, id: str = "", binary: bool = False) -> InferenceRequest:
    return InferenceRequest(RequestHeader("M", "", [], outputs, binary_by_default=binary), [], Caller(), 0, id)


def answer(*tensors: tuple[TensorSpec, bytes], **parameters: Any) -> InferenceResponse:
    header = ResponseHeader("M", "3", [spec for spec, _ in tensors], parameters)
    return InferenceResponse(header, [data for _, data in tensors])


def written(request: InferenceRequest, response: InferenceResponse) -> tuple[dict[str, str], bytes]:
    """Headers and body. Written twice: what is remembered must be the same."""
    first = b"".join(infer_response.write_infer_response(request, response, lambda _: SIGNATURE))
    assert b"".join(infer_response.write_infer_response(request, response, lambda _: SIGNATURE)) == first
    ((status, headers, body),) = replies(first)
    assert status == 200
    assert headers.pop("content-length") == str(len(body))
    return headers, body


JSON = {"content-type": "application/json"}


def octets(size: int) -> dict[str, str]:
    return {"content-type": "application/octet-stream", "inference-header-content-length": str(size)}


def test_json() -> None:
    headers, body = written(asked(), answer((FP32, FP32_DATA), (TEXT, TEXT_DATA)))
    assert headers == JSON
    assert (
        body
        == (
            '{"model_name":"M","model_version":"3","outputs":['
            '{"name":"X","datatype":"FP32","shape":[1,2],"data":[1.5,2.0]},'
            '{"name":"T","datatype":"BYTES","shape":[1],"data":["é"]}]}'
        ).encode()
    )


def test_binary() -> None:
    text = (
        b'{"model_name":"M","model_version":"3","outputs":['
        b'{"name":"X","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}},'
        b'{"name":"T","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":6}}]}'
    )
    headers, body = written(asked(binary=True), answer((FP32, FP32_DATA), (TEXT, TEXT_DATA)))
    assert headers == octets(len(text))
    assert body == text + FP32_DATA + TEXT_DATA


def test_id_and_parameters_where_there_are_any() -> None:
    _, body = written(asked(id='a "b" é'), answer((FP32, FP32_DATA), flag=True, number=1))
    assert (
        body
        == (
            '{"id":"a \\"b\\" é","model_name":"M","model_version":"3","parameters":{"flag":true,"number":1},"outputs":['
            '{"name":"X","datatype":"FP32","shape":[1,2],"data":[1.5,2.0]}]}'
        ).encode()
    )


def test_the_id_is_that_of_the_request() -> None:
    """What is remembered of one request must not be told to another."""
    response = answer((FP32, FP32_DATA))
    first = asked(binary=True)
    written(first, response)
    other = InferenceRequest(first.header, [], Caller(), 0, "other")
    assert json.loads(written(other, response)[1].partition(FP32_DATA)[0])["id"] == "other"
    assert b'"id"' not in written(first, response)[1]


@pytest.mark.parametrize(
    ("outputs", "by_default", "binary"),
    [
        ([], False, [False, False]),
        ([], True, [True, True]),
        ([RequestedOutput("X", binary=True)], False, [True, False]),
        # What is listed is JSON unless it says so itself, whatever the default.
        ([RequestedOutput("X")], True, [False, True]),
        ([RequestedOutput("X", binary=True), RequestedOutput("T")], True, [True, False]),
    ],
)
def test_which_outputs_are_binary(outputs: list[RequestedOutput], by_default: bool, binary: list[bool]) -> None:
    headers, body = written(asked(*outputs, binary=by_default), answer((FP32, FP32_DATA), (TEXT, TEXT_DATA)))
    size = int(headers.get("inference-header-content-length", len(body)))
    entries = json.loads(body[:size])["outputs"]
    assert [entry["name"] for entry in entries] == ["X", "T"]
    assert ["data" not in entry for entry in entries] == binary
    raw = b"".join(data for data, is_binary in zip((FP32_DATA, TEXT_DATA), binary, strict=True) if is_binary)
    assert body[size:] == raw


def test_binary_outputs_of_no_bytes_need_no_length() -> None:
    headers, body = written(asked(binary=True), answer((TensorSpec("X", dtypes.FP32, (0, 3)), b"")))
    assert headers == JSON
    assert body == (
        b'{"model_name":"M","model_version":"3","outputs":['
        b'{"name":"X","datatype":"FP32","shape":[0,3],"parameters":{"binary_data_size":0}}]}'
    )


def test_no_outputs() -> None:
    assert written(asked(), answer()) == (JSON, b'{"model_name":"M","model_version":"3","outputs":[]}')
    assert written(asked(binary=True), answer()) == (JSON, b'{"model_name":"M","model_version":"3","outputs":[]}')


def test_classes() -> None:
    _, body = written(asked(RequestedOutput("SCORES", classification=2)), answer((SCORES, SCORES_DATA)))
    assert json.loads(body)["outputs"] == [
        {"name": "SCORES", "datatype": "BYTES", "shape": [1, 2], "data": ["3.000000:1:dog", "2.000000:2"]}
    ]


def test_classes_as_bytes() -> None:
    wanted = RequestedOutput("SCORES", classification=1, binary=True)
    headers, body = written(asked(wanted), answer((SCORES, SCORES_DATA)))
    size = int(headers["inference-header-content-length"])
    assert json.loads(body[:size])["outputs"] == [
        {"name": "SCORES", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 18}}
    ]
    assert body[size:] == join_bytes(["3.000000:1:dog"])


def test_what_cannot_be_written_is_refused() -> None:
    half = TensorSpec("H", dtypes.FP16, (1,))
    with pytest.raises(InvalidArgument, match=r"^sending FP16 data via JSON is not supported\."):
        infer_response.write_infer_response(asked(), answer((half, b"\0\0")), lambda _: SIGNATURE)


def test_large_tensors_are_not_copied() -> None:
    data = memoryview(bytearray(80_000))
    response = InferenceResponse(ResponseHeader("M", "3", [TensorSpec("X", dtypes.UINT8, (80_000,))]), [data])
    request = asked(binary=True)
    for _ in range(2):
        assert infer_response.write_infer_response(request, response, lambda _: SIGNATURE)[1] is data


def test_strings_in_base64() -> None:
    data = join_bytes([b"\xff"])
    both = answer((TEXT, data), (TensorSpec("U", dtypes.BYTES, (1,)), data), (FP32, FP32_DATA))
    _, body = written(asked(RequestedOutput("T", base64=True)), answer((TEXT, data)))
    assert json.loads(body)["outputs"][0]["data"] == [{"b64": "/w=="}]
    request = InferenceRequest(
        RequestHeader("M", "", [], [RequestedOutput("U", binary=True)], base64_by_default=True), [], Caller(), 0
    )
    headers, body = written(request, both)
    outputs = json.loads(body[: int(headers["inference-header-content-length"])])["outputs"]
    assert [output.get("data") for output in outputs] == [[{"b64": "/w=="}], None, [1.5, 2.0]]


def test_half_precision_where_it_is_allowed() -> None:
    half = TensorSpec("H", dtypes.FP16, (2,))
    data = np.array([0.1, -2], "<f2").tobytes()
    text = b"".join(infer_response.write_infer_response(asked(), answer((half, data)), lambda _: SIGNATURE, half=True))
    assert text.endswith(b'"datatype":"FP16","shape":[2],"data":[0.1,-2.0]}]}')


def test_answers_of_another_shape_under_the_same_request() -> None:
    request = asked(binary=True)
    for columns in (1, 2, 1, 3):
        spec = TensorSpec("X", dtypes.UINT8, (1, columns))
        headers, body = written(request, answer((spec, b"x" * columns)))
        size = int(headers["inference-header-content-length"])
        assert json.loads(body[:size])["outputs"][0]["shape"] == [1, columns]
        assert body[size:] == b"x" * columns


def test_what_is_remembered_of_all_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HTTP_REPLIES, "limit", 64 * 1024)
    requests = [asked(binary=True) for _ in range(10)]
    for number in range(1000):
        infer_response.write_infer_response(requests[number % 10], answer((FP32, FP32_DATA)), lambda _: SIGNATURE)
        assert HTTP_REPLIES.used <= HTTP_REPLIES.limit
    assert 0 < sum(len(each.header.replies) for each in requests) < 100


@given(
    st.lists(
        st.tuples(
            st.sampled_from([dtypes.UINT8, dtypes.INT64, dtypes.FP64, dtypes.BOOL, dtypes.BYTES]),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=4,
    ),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
def test_a_client_reads_what_was_written(tensors: list[tuple[dtypes.DataType, int, bool]], id: str) -> None:
    outputs, pairs = [], []
    for number, (datatype, count, binary) in enumerate(tensors):
        spec = TensorSpec(f"OUT{number}", datatype, (count,))
        text = datatype is dtypes.BYTES
        data = join_bytes(["x" * number] * count) if text else bytes([1]) * spec.byte_size
        outputs.append(RequestedOutput(spec.name, binary=binary))
        pairs.append((spec, data))
    headers, body = written(asked(*outputs, id=id), answer(*pairs))
    size = int(headers.get("inference-header-content-length", len(body)))
    document = json.loads(body[:size])
    at = size
    assert document.get("id", "") == id
    for entry, (spec, data) in zip(document["outputs"], pairs, strict=True):
        assert (entry["name"], entry["datatype"], entry["shape"]) == (spec.name, spec.datatype.name, list(spec.shape))
        if "data" in entry:
            assert bytes(json_tensors.read_tensor(spec, entry["data"])) == data
        else:
            length = entry["parameters"]["binary_data_size"]
            assert body[at : at + length] == data
            at += length
    assert at == len(body)
