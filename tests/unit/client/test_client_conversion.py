"""Values to tensors: nothing is lost unless it is a list's fraction, and the shape fits or is refused."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from nerite.client import ClientError, TensorDescription
from nerite.client.tensors import fit, to_json, to_tensor, widened
from nerite.core import tensor as dtypes
from nerite.core.tensor import DataType

NUMBERS = [datatype for datatype in dtypes.ALL if datatype not in (dtypes.BYTES, dtypes.BF16)]


def convert(datatype: DataType, value: object, *shape: int) -> Any:
    """Return ``value`` as a tensor of any length, or of ``shape``."""
    return to_tensor(TensorDescription("X", datatype.name, shape or (-1,)), value)[1]


def refused(datatype: DataType, value: object, *shape: int) -> str:
    with pytest.raises(ClientError) as error:
        convert(datatype, value, *shape)
    assert error.value.status is None
    return str(error.value)


def test_what_the_way_back_alone_would_not_tell() -> None:
    for datatype, array in (
        (dtypes.UINT8, np.array([-1], np.int8)),
        (dtypes.INT32, np.array([-np.inf], np.float16)),
        (dtypes.FP16, np.array([-(2**31)], np.int32)),
        (dtypes.FP32, np.array([2**64 - 1], np.uint64)),
        (dtypes.INT64, np.array([2.0**63])),
    ):
        assert "cannot be converted without loss" in refused(datatype, array)


@given(st.data(), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
def test_an_array_is_the_same_afterwards_or_refused(data: st.DataObject, source: DataType, target: DataType) -> None:
    array = data.draw(npst.arrays(source.numpy, st.integers(0, 3)))
    exact = all(fits(value, target) for value in array.tolist())
    if not exact:
        assert "cannot be converted without loss" in refused(target, array)
        return
    converted = convert(target, array)
    assert converted.dtype == target.numpy
    for before, after in zip(array.tolist(), converted.tolist(), strict=True):
        assert before == after or (math.isnan(before) and math.isnan(after))


def fits(value: float, target: DataType) -> bool:
    """Say whether a number is one of a data type, by Python's arithmetic, which is exact."""
    if target.numpy.kind == "f":
        if math.isinf(value) or math.isnan(value):
            return True
        with np.errstate(over="ignore"):
            there = float(target.numpy.type(value))
        return there == value
    if math.isinf(value) or math.isnan(value) or value != int(value):
        return False
    if target is dtypes.BOOL:
        return value in (0, 1)
    limits = np.iinfo(target.numpy)
    return int(limits.min) <= value <= int(limits.max)


def test_fractions_of_a_list_are_rounded() -> None:
    assert convert(dtypes.FP32, [0.1, 1e-60]).tolist() == [np.float32(0.1), 0]
    assert convert(dtypes.FP16, [0.1]).dtype == np.float16
    assert "0.1 cannot be converted without loss. To have it rounded, pass array.astype(numpy.float32)" in refused(
        dtypes.FP32, np.array([0.1])
    )


@pytest.mark.parametrize(
    ("datatype", "value", "wrong"),
    [
        (dtypes.INT32, [1, 1.5], "1.5"),
        (dtypes.INT8, [0, 128], "128"),
        (dtypes.UINT8, [-1], "-1"),
        (dtypes.FP32, [2**24 + 1], "16777217"),
        (dtypes.FP32, [1e39], "1e+39"),
        (dtypes.BF16, [257], "257"),
        (dtypes.BOOL, [2], "2"),
        (dtypes.INT64, [2**63], "9223372036854775808"),
    ],
)
def test_a_list_that_does_not_fit(datatype: DataType, value: list[float], wrong: str) -> None:
    assert refused(datatype, value) == f"input X ({datatype.name} [-1]): {wrong} cannot be converted without loss."


@pytest.mark.parametrize("value", ["text", ["a"], b"x", [None], {"a": 1}, [1j], [10**30]])
def test_what_is_no_number(value: object) -> None:
    assert "is not a number of that type" in refused(dtypes.INT32, value, -1, 1) or "loss" in refused(
        dtypes.INT32, value, -1, 1
    )


def test_rows_of_different_lengths() -> None:
    assert "differ in length" in refused(dtypes.INT32, [[1, 2], [3]], -1, -1)


@given(npst.arrays(np.float32, st.integers(0, 4)))
def test_brain_floats_are_rounded_as_by_those_who_have_them(array: Any) -> None:
    with np.errstate(over="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    overflows = np.isinf(expected.astype(np.float32)) & np.isfinite(array)
    if overflows.any():
        assert "without loss" in refused(dtypes.BF16, array.tolist())
        return
    words = convert(dtypes.BF16, array.tolist())
    np.testing.assert_array_equal(widened(words), expected.astype(np.float32))
    assert np.array_equal(convert(dtypes.BF16, expected), expected.view(np.uint16))
    np.testing.assert_array_equal(widened(convert(dtypes.BF16, expected.astype(np.float32))), widened(words))


def test_texts() -> None:
    assert convert(dtypes.BYTES, "hello").tolist() == ["hello"]
    assert convert(dtypes.BYTES, b"\xff", -1, 1).tolist() == [[b"\xff"]]
    assert convert(dtypes.BYTES, ["a", b"b"]).tolist() == ["a", b"b"]
    assert convert(dtypes.BYTES, np.array(["a", "b"])).tolist() == ["a", "b"]
    assert "1 is neither text nor bytes" in refused(dtypes.BYTES, ["a", 1])
    assert "neither text nor bytes" in refused(dtypes.BYTES, [["a"], ["b", "c"]])


@pytest.mark.parametrize(
    ("shape", "wanted", "fitted"),
    [
        ((2, 3), (-1, 3), (2, 3)),
        ((3,), (-1, 3), (1, 3)),
        ((2,), (-1, 1), (2, 1)),
        ((), (-1, 1), (1, 1)),
        ((), (), ()),
        ((4,), (-1, 3), None),
        ((2, 3), (-1,), None),
        ((), (2,), None),
        ((3,), (-1, -1), (1, 3)),
    ],
)
def test_ones_are_added_until_it_fits(
    shape: tuple[int, ...], wanted: tuple[int, ...], fitted: tuple[int, ...] | None
) -> None:
    assert fit(shape, wanted) == fitted


def test_a_shape_that_does_not_fit() -> None:
    assert refused(dtypes.INT32, [1, 2, 3], -1, 2) == "input X (INT32 [-1, 2]): a value of shape [3] does not fit"


def test_a_data_type_of_another_world() -> None:
    with pytest.raises(ClientError, match="unknown data type COMPLEX"):
        to_tensor(TensorDescription("X", "COMPLEX", (1,)), 1)


def test_plain_values() -> None:
    assert to_json({}) == {}
    assert to_json([np.arange(2), (b"x", "y"), np.float32(0.5), 1]) == [[0, 1], ["x", "y"], 0.5, 1]
