"""Infer responses over gRPC, read by protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureOutput
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.grpc import wire
from nerite.wire.grpc_service import ModelInferResponse

SIGNATURE = Signature("M", 8, [], [SignatureOutput("SCORES", dtypes.FP32, (3,), ("cat", "dog"))])
SCORES = TensorSpec("SCORES", dtypes.FP32, (1, 3))
SCORES_DATA = np.array([1.0, 3.0, 2.0], np.float32).tobytes()


def asked(*outputs: RequestedOutput, id: str = "") -> InferenceRequest:
    return InferenceRequest(RequestHeader("M", "", [], outputs), [], Caller(), 0, id)


def written(request: InferenceRequest, response: InferenceResponse) -> Any:
    """The message. Written twice: what is remembered must be the same."""
    first = b"".join(wire.write_infer_response(request, response, lambda _: SIGNATURE))
    assert b"".join(wire.write_infer_response(request, response, lambda _: SIGNATURE)) == first
    assert first[:5] == b"\0" + (len(first) - 5).to_bytes(4)
    return ModelInferResponse.FromString(first[5:])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
TENSORS = st.lists(
    st.tuples(
        TEXTS,
        st.sampled_from(dtypes.ALL),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=4,
)
PARAMETERS = st.dictionaries(
    TEXTS, st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS, max_size=3
)


@given(TENSORS, PARAMETERS, TEXTS)
def test_any_response(
    tensors: list[tuple[str, dtypes.DataType, tuple[int, ...]]], parameters: dict[str, Any], id: str
) -> None:
    specs = [TensorSpec(name, datatype, shape) for name, datatype, shape in tensors]
    data = [bytes([7]) * max(spec.byte_size, 0) or join_bytes(["x"] * spec.elements) for spec in specs]
    data = [b"" if spec.byte_size == 0 else raw for spec, raw in zip(specs, data, strict=True)]
    message = written(asked(id=id), InferenceResponse(ResponseHeader("m", "3", specs, parameters), data))
    assert (message.model_name, message.model_version, message.id) == ("m", "3", id)
    assert [(each.name, each.datatype, tuple(each.shape)) for each in message.outputs] == [
        (spec.name, spec.datatype.name, spec.shape) for spec in specs
    ]
    assert list(message.raw_output_contents) == data
    found = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()}
    assert {key: (type(value), value) for key, value in found.items()} == {
        key: (type(value), value) for key, value in parameters.items()
    }
    assert all(not each.HasField("contents") for each in message.outputs)


def test_a_number_beyond_63_bits() -> None:
    response = InferenceResponse(ResponseHeader("m", "3", [], {"large": 2**64 - 1}))
    parameter = written(asked(), response).parameters["large"]
    assert (parameter.WhichOneof("parameter_choice"), parameter.uint64_param) == ("uint64_param", 2**64 - 1)


def test_large_tensors_are_not_copied() -> None:
    data = memoryview(bytearray(80_000))
    response = InferenceResponse(ResponseHeader("M", "3", [TensorSpec("X", dtypes.FP32, (20_000,))]), [data])
    for request in (asked(), asked(id="7"), asked()):
        assert any(part is data for part in wire.write_infer_response(request, response, lambda _: SIGNATURE))


def test_large_and_small_tensors_in_their_order() -> None:
    specs = [TensorSpec(name, dtypes.UINT8, (size,)) for name, size in (("A", 2), ("B", 80_000), ("C", 3))]
    data = [b"ab", bytes(80_000), b"cde"]
    message = written(asked(), InferenceResponse(ResponseHeader("M", "3", specs), data))
    assert list(message.raw_output_contents) == data


def test_texts_of_any_length_under_one_header() -> None:
    header = ResponseHeader("M", "3", [TensorSpec("T", dtypes.BYTES, (1,))])
    for text in ("a", "bcd", ""):
        message = written(asked(), InferenceResponse(header, [join_bytes([text])]))
        assert list(message.raw_output_contents) == [join_bytes([text])]


def test_the_id_is_that_of_the_request() -> None:
    response = InferenceResponse(ResponseHeader("M", "3", []))
    assert [written(asked(id=id), response).id for id in ("", "a", "", "b")] == ["", "a", "", "b"]


def test_classes() -> None:
    other = TensorSpec("X", dtypes.UINT8, (1, 1))
    response = InferenceResponse(ResponseHeader("M", "3", [SCORES, other], {"a": 1}), [SCORES_DATA, b"x"])
    request = asked(RequestedOutput("SCORES", binary=True, classification=2), RequestedOutput("X", binary=True))
    message = written(request, response)
    assert [(each.name, each.datatype, tuple(each.shape)) for each in message.outputs] == [
        ("SCORES", "BYTES", (1, 2)),
        ("X", "UINT8", (1, 1)),
    ]
    assert list(message.raw_output_contents) == [join_bytes(["3.000000:1:dog", "2.000000:2"]), b"x"]
    assert message.parameters["a"].int64_param == 1
    # What one request wants is not what another gets.
    assert list(written(asked(), response).raw_output_contents) == [SCORES_DATA, b"x"]


def test_what_has_no_classes_is_refused() -> None:
    half = TensorSpec("SCORES", dtypes.FP16, (1, 1))
    response = InferenceResponse(ResponseHeader("M", "3", [half]), [b"\0\0"])
    with pytest.raises(InvalidArgument, match="class result not available for output due to unsupported type 'FP16'"):
        wire.write_infer_response(asked(RequestedOutput("SCORES", classification=1)), response, lambda _: SIGNATURE)
