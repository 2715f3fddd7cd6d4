"""Tensors in JSON, both ways. The texts and oddities are Triton's."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.tensor import DataType, TensorSpec, buffer_of, join_bytes
from nerite.transports.http import json_tensors

OTHERS = (dtypes.BYTES, dtypes.BF16, dtypes.FP16)
NUMBERS = [datatype for datatype in dtypes.ALL if datatype not in OTHERS]


def spec(datatype: DataType, *shape: int) -> TensorSpec:
    return TensorSpec("IN", datatype, shape)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[DataType, np.ndarray[Any, Any]]:
    datatype = draw(st.sampled_from(NUMBERS))
    shape = draw(npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
    elements = st.floats(width=32, allow_nan=False) if datatype is dtypes.FP32 else None
    if datatype is dtypes.FP64:
        elements = st.floats(allow_nan=False)
    return datatype, draw(npst.arrays(datatype.numpy, shape, elements=elements))


@given(arrays(), st.booleans())
def test_numbers_survive(example: tuple[DataType, np.ndarray[Any, Any]], nested: bool) -> None:
    datatype, array = example
    of = TensorSpec("IN", datatype, array.shape)
    raw = bytes(buffer_of(array, datatype))
    value = array.tolist() if nested else array.reshape(-1).tolist()
    assert bytes(json_tensors.read_tensor(of, value)) == raw
    written = json_tensors.write_tensor(of, raw)
    assert bytes(json_tensors.read_tensor(of, json.loads(written))) == raw


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=5))
def test_texts_survive(texts: list[str]) -> None:
    of = spec(dtypes.BYTES, len(texts))
    raw = json_tensors.read_tensor(of, texts)
    assert bytes(raw) == join_bytes(texts)
    assert json.loads(json_tensors.write_tensor(of, raw)) == texts


@pytest.mark.parametrize(
    "value", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2, 3, 4]], [1, [2, 3], [[4]]], [[[[1]]], 2, 3, 4]]
)
def test_any_nesting_will_do(value: list[Any]) -> None:
    assert bytes(json_tensors.read_tensor(spec(dtypes.UINT8, 2, 2), value)) == b"\1\2\3\4"


def leaves(value: list[Any]) -> list[Any]:
    return [leaf for item in value for leaf in (leaves(item) if isinstance(item, list) else [item])]


NESTED = st.lists(st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=4), max_leaves=20), max_size=4)


@given(NESTED)
def test_elements_are_in_row_major_order_whatever_the_nesting(value: list[Any]) -> None:
    assert json_tensors.flat(value) == leaves(value)


@given(NESTED, st.integers(0, 20))
def test_elements_are_as_many_as_the_shape_says_whatever_the_nesting(value: list[Any], wanted: int) -> None:
    elements = leaves(value)
    if not wanted:  # nothing is read
        assert json_tensors.read_tensor(spec(dtypes.UINT8, 0), value) == b""
    elif len(elements) == wanted:
        assert bytes(json_tensors.read_tensor(spec(dtypes.UINT8, wanted), value)) == bytes(elements)
    else:
        with pytest.raises(Internal, match="Shape does not match true shape of 'data' field"):
            json_tensors.read_tensor(spec(dtypes.UINT8, wanted), value)


@pytest.mark.parametrize("beside", [[], [2]])
def test_nesting_has_a_limit(beside: list[int]) -> None:
    value: list[Any] = [1]
    for _ in range(97):
        value = [value]
    assert json_tensors.flat([value, *beside]) == [1, *beside]
    with pytest.raises(InvalidArgument, match="JSON nesting depth exceeds maximum allowed limit"):
        json_tensors.flat([[value], *beside])


@pytest.mark.parametrize(
    ("datatype", "given", "wrapped"),
    [
        (dtypes.INT8, 128, -128),
        (dtypes.INT8, -129, 127),
        (dtypes.INT16, 32768, -32768),
        (dtypes.INT32, 2**31, -(2**31)),
        (dtypes.INT32, 2**63 - 1, -1),
        (dtypes.UINT8, 256, 0),
        (dtypes.UINT16, 65537, 1),
        (dtypes.UINT32, 2**64 - 1, 2**32 - 1),
        (dtypes.UINT64, 2**64 - 1, 2**64 - 1),
        (dtypes.INT64, -(2**63), -(2**63)),
    ],
)
def test_whole_numbers_that_do_not_fit_wrap_server_context(datatype: DataType, given: int, wrapped: int) -> None:
    raw = json_tensors.read_tensor(spec(datatype, 2), [given, 0])
    assert np.frombuffer(raw, datatype.numpy).tolist() == [wrapped, 0]


def test_a_number_too_large_for_fp32_is_infinite() -> None:
    raw = json_tensors.read_tensor(spec(dtypes.FP32, 4), [1e39, -1e39, 10**300, 2.5])
    assert np.frombuffer(raw, np.float32).tolist() == [math.inf, -math.inf, math.inf, 2.5]


SIGNED = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
UNSIGNED = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
BOOLEAN = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
DOUBLE = "Unable to parse 'data': attempt to access JSON non-number as double"
STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
ARRAY = "Unable to parse 'data': attempt to access JSON non-array as array"
SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field (input '{}' has {} values, and its "
SHAPE += "shape [1] needs 1)"


@pytest.mark.parametrize(
    ("datatype", "value", "message"),
    [
        *((dtypes.INT32, [wrong], SIGNED) for wrong in (1.5, 1.0, "1", True, None, {}, 2**63, -(2**63) - 1)),
        *((dtypes.INT64, [wrong], SIGNED) for wrong in (2**63, -(2**63) - 1)),
        *((dtypes.UINT32, [wrong], UNSIGNED) for wrong in (-1, 1.5, "1", False, None, 2**64)),
        *((dtypes.BOOL, [wrong], BOOLEAN) for wrong in (1, 0, "true", None, 1.0)),
        *((dtypes.FP32, [wrong], DOUBLE) for wrong in ("1.5", None, {}, True)),
        *((dtypes.FP64, [wrong], DOUBLE) for wrong in ("1.5", None, {}, True)),
        *((dtypes.BYTES, [wrong], STRING) for wrong in (1, None, True)),
        *((dtypes.INT32, wrong, ARRAY) for wrong in (1, "1", None, {})),
        *((dtypes.INT32, wrong, SHAPE.format("IN", len(wrong))) for wrong in ([1, 2], [])),
        (dtypes.INT32, [[1, [2, 3]], 4, 5], SHAPE.format("IN", 5)),
    ],
)
def test_mistakes(datatype: DataType, value: object, message: str) -> None:
    with pytest.raises(Internal) as caught:
        json_tensors.read_tensor(spec(datatype, 1), value)
    assert caught.value.message == message


@pytest.mark.parametrize("data", [[], [1, 2], ["a"], 5, None])
def test_data_without_a_dimension_or_without_elements_is_not_read(data: object) -> None:
    for datatype in dtypes.ALL:
        scalar, empty = spec(datatype), spec(datatype, 3, 0)
        assert len(json_tensors.read_tensor(scalar, data)) == (scalar.byte_size if datatype.size else 4)
        assert json_tensors.read_tensor(empty, data) == b""


def test_how_many_texts_there_are_is_checked_with_the_signature() -> None:
    assert bytes(json_tensors.read_tensor(spec(dtypes.BYTES, 1), ["a", "b"])) == join_bytes(["a", "b"])


@pytest.mark.parametrize("datatype", [dtypes.FP16, dtypes.BF16])
def test_half_precision_is_not_for_json(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument) as caught:
        json_tensors.read_tensor(spec(datatype, 1), [1.5])
    assert caught.value.message == (
        f"receiving {datatype.name} data via JSON is not supported. Please use the binary data format for input IN "
        "or start the server with --http-json-half-precision=true"
    )
    with pytest.raises(InvalidArgument) as caught:
        json_tensors.write_tensor(spec(datatype, 1), b"\0\0")
    assert caught.value.message.startswith(
        f"sending {datatype.name} data via JSON is not supported. Please use the binary data format for output"
    )


@pytest.mark.parametrize("datatype", dtypes.ALL)
def test_no_elements(datatype: DataType) -> None:
    assert bytes(json_tensors.read_tensor(spec(datatype, 0, 3), [])) == b""
    if datatype not in (dtypes.FP16, dtypes.BF16):
        assert json_tensors.write_tensor(spec(datatype, 0, 3), b"") == b"[]"


@pytest.mark.parametrize(
    ("datatype", "values", "text"),
    [
        (dtypes.FP32, [0, 1, 1.5, 0.1, -0.0, 1e10], b"[0.0,1.0,1.5,0.10000000149011612,-0.0,10000000000.0]"),
        (dtypes.FP64, [0.1, 2.5, 1 / 3], b"[0.1,2.5,0.3333333333333333]"),
        (dtypes.FP32, [1.5, math.nan, math.inf, -math.inf], b"[1.5,NaN,Infinity,-Infinity]"),
        (dtypes.FP64, [math.nan], b"[NaN]"),
        (dtypes.BOOL, [True, False], b"[true,false]"),
        (dtypes.UINT64, [2**64 - 1, 0], b"[18446744073709551615,0]"),
        (dtypes.INT8, [-128, 127], b"[-128,127]"),
    ],
)
def test_numbers_as_triton_prints_them(datatype: DataType, values: list[Any], text: bytes) -> None:
    raw = np.array(values, datatype.numpy).tobytes()
    assert json_tensors.write_tensor(spec(datatype, len(values)), raw) == text


@given(st.lists(st.floats(width=32), max_size=6))
def test_numbers_that_json_lacks_stand_in_their_places(values: list[float]) -> None:
    for datatype in (dtypes.FP32, dtypes.FP64):
        raw = np.array(values, datatype.numpy).tobytes()
        written = json.loads(json_tensors.write_tensor(spec(datatype, len(values)), raw))
        np.testing.assert_array_equal(np.array(written, datatype.numpy), np.array(values, datatype.numpy))


@pytest.mark.parametrize("datatype", NUMBERS)
def test_bytes_at_an_odd_address(datatype: DataType) -> None:
    """An in-process model may hand back a part of the request as it is."""
    raw = np.array([1, 0], datatype.numpy).tobytes()
    expected = json_tensors.write_tensor(spec(datatype, 2), raw)
    shifted = bytearray(b"x" + raw)
    assert json_tensors.write_tensor(spec(datatype, 2), memoryview(shifted)[1:]) == expected


def test_booleans_are_any_byte_but_zero() -> None:
    assert json_tensors.write_tensor(spec(dtypes.BOOL, 3), b"\x01\xff\x00") == b"[true,true,false]"


def test_texts_that_are_not_utf8_pass_as_they_are() -> None:
    assert json_tensors.write_tensor(spec(dtypes.BYTES, 2), join_bytes([b"\xff\x00", "é".encode()])) == (
        b'["\xff\\u0000","\xc3\xa9"]'
    )
    assert bytes(json_tensors.read_tensor(spec(dtypes.BYTES, 1), ["\udcff\udcfe"])) == join_bytes([b"\xff\xfe"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.sampled_from(dtypes.ALL), VALUES)
def test_anything_is_read_or_refused(datatype: DataType, value: object) -> None:
    try:
        raw = json_tensors.read_tensor(spec(datatype, 2), value)
    except NeriteError:
        return
    except UnicodeEncodeError:  # a lone surrogate; no JSON text that is let in has one
        assert datatype is dtypes.BYTES
        return
    assert datatype is dtypes.BYTES or len(raw) == 2 * datatype.size
