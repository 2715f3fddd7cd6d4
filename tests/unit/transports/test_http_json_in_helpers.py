"""What a helper reads and writes is what is read and written on the event loop, to the byte, after crossing as well."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from doubles import crossed
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import (
    NOBODY,
    InferenceRequest,
    RequestedOutput,
    RequestHeader,
    SharedMemoryInput,
    SharedMemoryRequest,
)
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.access import SenderHeaders
from nerite.transports.clouds import SAGEMAKER
from nerite.transports.http import content_coding, files, generate_form, infer_response, large_json
from nerite.transports.http.files import FormPart
from nerite.transports.http.generate_form import GenerateForm
from nerite.transports.http.handler import HTTP, HttpDialect
from nerite.transports.http.infer_request import HttpInferReader


def called(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what a function returns when arguments and result cross to a helper and back."""
    returned = function(*crossed(arguments))
    return crossed(returned if isinstance(returned, tuple) else (returned,))


def reader(half: bool = True) -> HttpInferReader:
    return HttpInferReader("M", "3", SenderHeaders({"x-forwarded": "yes"}), 10_000, half)


def plans(text: bytes) -> tuple[Any, Any]:
    """What a body says, read here and by a helper; or why it is refused."""

    def told(make: Callable[[], Any]) -> Any:
        try:
            plan = make()
        except NeriteError as error:
            return type(error).code, error.message
        data = [bytes(each) if isinstance(each, bytes | memoryview) else each for each in plan.places]
        shared = [
            (each.region, each.offset, each.byte_size) if isinstance(each, SharedMemoryInput) else each for each in data
        ]
        return plan.header.identity(), plan.id, shared, plan.size

    def outside() -> Any:
        read = called(large_json.read_infer, text, "M", 10_000, True, 1024)
        plan, wrong = reader().plan_of(read)
        if all(not isinstance(place, tuple | SharedMemoryInput) for place in plan.places):
            data = plan.data(memoryview(bytes(plan.size)), 0)
            request = InferenceRequest(reader().plan(text).header, data, NOBODY, 0, plan.id)
            counts = Signature("M", 0, [], []).check_data(request)
            assert wrong == ("" if counts is None else counts.message)
            if not wrong:
                assert plan.header.sizes == [len(place) for place in plan.places]
        return plan

    return told(lambda: reader().plan(text)), told(outside)


TEXTS = st.text(max_size=4)
NUMBERS = st.integers(-(2**65), 2**65) | st.floats() | st.booleans()
INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["A", "B", "é"]),
        "datatype": st.sampled_from(["FP32", "INT64", "BYTES", "BOOL", "FP16", "UINT8"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
    },
    optional={
        "data": st.recursive(
            NUMBERS | TEXTS | st.fixed_dictionaries({"b64": st.sampled_from(["", "/w==", "AAEC", "!"])}),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=12,
        ),
        "parameters": st.fixed_dictionaries(
            {},
            optional={
                "binary_data_size": st.integers(-1, 8),
                "shared_memory_region": TEXTS,
                "shared_memory_byte_size": st.integers(0, 9),
            },
        ),
    },
)
OUTPUTS = st.fixed_dictionaries(
    {"name": st.sampled_from(["X", "Y"])},
    optional={
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data", "base64", "classification", "shared_memory_region", "other"]),
            st.booleans() | st.integers(-1, 3) | TEXTS,
            max_size=2,
        )
    },
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "a", "b"]) | TEXTS,
    NUMBERS | TEXTS,
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3)},
    optional={"id": TEXTS, "outputs": st.lists(OUTPUTS, max_size=2), "parameters": PARAMETERS},
)
NUMBER = {"name": "A", "shape": [2], "datatype": "FP32", "data": [1.5, float("nan")]}
STRINGS = {"name": "A", "shape": [2], "datatype": "BYTES"}


@given(BODIES)
@example({"inputs": [NUMBER], "id": "me", "parameters": {"sequence_id": "x", "a": 1.5}})
@example({"inputs": [{**STRINGS, "data": ["a", {"b64": "/w=="}]}]})
@example({"inputs": [{**STRINGS, "data": ["a"]}], "id": "few"})
@example({"inputs": [{**STRINGS, "data": ["a", "b", "c"]}]})
@example({"inputs": [{"name": "A", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}, NUMBER]})
@example({"inputs": [{**NUMBER, "data": [[1], 2]}], "outputs": [{"name": "X", "parameters": {"classification": 2}}]})
def test_an_infer_request(body: Any) -> None:
    here, outside = plans(json.dumps(body).encode())
    assert str(here) == str(outside)  # as NaN is not equal to itself


def inputs_of(datatype: dtypes.DataType, *dims: int) -> Signature:
    return Signature(
        "M", 4, [SignatureInput("IN", datatype, dims), SignatureInput("MORE", dtypes.BYTES, (1,), optional=True)], []
    )


@given(st.sampled_from([dtypes.FP32, dtypes.BYTES, dtypes.INT8]), st.lists(NUMBERS | TEXTS, max_size=6), PARAMETERS)
def test_a_form(datatype: dtypes.DataType, values: list[Any], parameters: dict[str, Any]) -> None:
    signature = inputs_of(datatype, -1)
    body = json.dumps({"IN": values, "id": "me", "parameters": {**parameters, "base64_output": True}}).encode()

    def said(form: GenerateForm) -> Any:
        return str(form.header("M", "").identity()), form.id, [bytes(each) for each in form.data]

    here, outside = (
        GenerateForm(signature, SenderHeaders({}), half=True),
        GenerateForm(signature, SenderHeaders({}), half=True),
    )
    declared = large_json.tensors_json(signature.inputs.values())
    try:
        here.read(body)
    except NeriteError as error:
        with pytest.raises(type(error)) as refusal:
            called(large_json.read_form, body, "M", declared, True, True)
        assert refusal.value.message == error.message
        return
    large_json.fill(outside, called(large_json.read_form, body, "M", declared, True, True))
    assert said(outside) == said(here)
    assert outside.wrong == ""
    assert outside.header("M", "").sizes == [len(each) for each in here.data]


def test_a_form_with_other_numbers_of_strings_than_it_seems() -> None:
    form = GenerateForm(inputs_of(dtypes.BYTES, -1), SenderHeaders({}))
    read = called(large_json.read_form, b'{"IN": [["a", "b"]]}', "M", [("IN", "BYTES", [-1])], True, False)
    large_json.fill(form, read)
    assert form.wrong is not None
    assert "unexpected number of string elements 2 for inference input 'IN' for model 'M'" in form.wrong


def test_parts_of_an_upload() -> None:
    signature = inputs_of(dtypes.FP32, -1)
    given = [
        (signature.inputs["IN"], FormPart("IN", "", b"[1.5, NaN]")),
        (signature.inputs["MORE"], FormPart("MORE", "", b"x")),
    ]
    here = [files.read_file(declared, True, part, 1000, False) for declared, part in given]
    declared = large_json.tensors_json(each for each, _ in given)
    outside = large_json.tensors_of(
        called(large_json.read_parts, declared, ["", ""], True, 1000, False, *(part.data for _, part in given))
    )
    assert [(spec, bytes(data)) for spec, data in outside] == [(spec, bytes(data)) for spec, data in here]


def test_a_load() -> None:
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.py": "/w=="}}).encode()
    assert large_json.load_of(called(large_json.read_load, body)) == {"config": "{}", "file:1/model.py": b"\xff"}
    assert large_json.load_of(called(large_json.read_load, b"[]")) == {}
    with pytest.raises(InvalidArgument, match="load parameter 'file:x' is not base64"):
        called(large_json.read_load, b'{"parameters":{"file:x":"?"}}')


SCORES = np.array([[1, 3, 2], [6, 5, 4]], np.float32)
SIGNATURE = Signature("M", 4, [], [SignatureOutput("SCORES", dtypes.FP32, (3,), ("cat", "dog"))])
RESPONSE = InferenceResponse(
    ResponseHeader(
        "M",
        "3",
        [
            TensorSpec("SCORES", dtypes.FP32, (2, 3)),
            TensorSpec("TEXT", dtypes.BYTES, (1,)),
            TensorSpec("BYTES", dtypes.BYTES, (1,)),
            TensorSpec("HALF", dtypes.FP16, (1,)),
            TensorSpec("PLACED", dtypes.UINT8, (3,)),
        ],
        {"why": "because", "count": 2},
    ),
    [SCORES.tobytes(), join_bytes(["é"]), join_bytes([b"\xff"]), np.float16(0.1).tobytes(), b"abc"],
)


class Place:
    size = 3

    def write(self, data: Any) -> None:
        assert bytes(data) in (b"abc", b"")


@pytest.mark.parametrize("accepts", ["", "gzip"])
@pytest.mark.parametrize("dialect", [HTTP, SAGEMAKER])
@pytest.mark.parametrize(
    ("outputs", "defaults"),
    [
        ([], {}),
        ([RequestedOutput("SCORES", classification=2)], {}),
        ([RequestedOutput("SCORES", binary=True), RequestedOutput("BYTES", base64=True)], {}),
        ([], {"binary_by_default": True}),
        ([RequestedOutput("PLACED", place=SharedMemoryInput("r", 0, 3))], {"base64_by_default": True}),
    ],
)
def test_a_reply(outputs: list[RequestedOutput], defaults: dict[str, bool], dialect: HttpDialect, accepts: str) -> None:
    def request() -> SharedMemoryRequest:
        made = SharedMemoryRequest(RequestHeader("M", "", (), outputs, **defaults), [], NOBODY, 0, "me")
        made.places = {output.name: Place() for output in outputs}
        return made

    here = b"".join(infer_response.write_infer_response(request(), RESPONSE, lambda _: SIGNATURE, dialect, half=True))
    arguments = large_json.infer_arguments(request(), RESPONSE, SIGNATURE, dialect, True, accepts)
    head, *rest = called(large_json.write_infer, *arguments)
    assert bytes(head).endswith(b"\r\n\r\n")
    body = b"".join(rest)
    assert f"Content-Length: {len(body)}\r\n".encode() in bytes(head)
    if accepts:
        assert b"Content-Encoding: gzip\r\n" in bytes(head)
        body = bytes(content_coding.decompress(memoryview(body), 10_000))
        assert body == here.partition(b"\r\n\r\n")[2]
    else:
        assert bytes(head) + body == here


def test_a_reply_that_cannot_be_written_is_refused_in_the_same_words() -> None:
    request = InferenceRequest(RequestHeader("M", "", ()), [], NOBODY, 0)
    with pytest.raises(InvalidArgument) as here:
        infer_response.write_infer_response(request, RESPONSE, lambda _: SIGNATURE)
    with pytest.raises(InvalidArgument) as outside:
        called(large_json.write_infer, *large_json.infer_arguments(request, RESPONSE, SIGNATURE, HTTP, False, ""))
    assert outside.value.message == here.value.message


@pytest.mark.parametrize("base64", [False, True])
def test_a_response_to_generate(base64: bool) -> None:
    request = InferenceRequest(RequestHeader("M", "", (), base64_by_default=base64), [], NOBODY, 0, "me")
    (text,) = called(large_json.write_generate, *large_json.generate_arguments(request, RESPONSE, True))
    assert bytes(text) == generate_form.write_generate(request, RESPONSE, half=True)


def test_a_body_that_was_compressed() -> None:
    (plain,) = called(content_coding.decompress, gzip.compress(b"x" * 1000), 1000)
    assert bytes(plain) == b"x" * 1000
    with pytest.raises(InvalidArgument, match="exceeds the maximum allowed value of 999 bytes"):
        called(content_coding.decompress, gzip.compress(b"x" * 1000), 999)
