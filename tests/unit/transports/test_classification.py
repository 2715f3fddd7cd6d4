"""Outputs as their best classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import DataType, TensorSpec, decode_bytes
from nerite.transports import output_parameters

LABELS = ("cat", "dog", "é")


def top(
    values: Any, count: int, *, datatype: DataType = dtypes.FP32, labels: tuple[str, ...] = (), batching: bool = True
) -> tuple[tuple[int, ...], list[str]]:
    """Shape and texts of the best ``count`` of ``values``."""
    array = np.array(values, datatype.numpy)
    spec, data = output_parameters.top_classes(
        TensorSpec("OUT", datatype, array.shape), array.tobytes(), count, labels, batching=batching
    )
    assert (spec.name, spec.datatype) == ("OUT", dtypes.BYTES)
    return spec.shape, [text.decode() for text in decode_bytes(data, spec.elements)]


def test_the_best_of_each_row() -> None:
    assert top([[0.25, 0.5, 0.125, 7], [1, 0, -1, -2]], 2) == (
        (2, 2),
        ["7.000000:3", "0.500000:1", "1.000000:0", "0.000000:1"],
    )


def test_labels_where_there_are_any() -> None:
    assert top([[1, 2, 3, 4]], 4, labels=LABELS)[1] == [
        "4.000000:3",
        "3.000000:2:é",
        "2.000000:1:dog",
        "1.000000:0:cat",
    ]


def test_without_a_batch_dimension_everything_is_one_row() -> None:
    assert top([1, 5, 3], 2, batching=False) == ((2,), ["5.000000:1", "3.000000:2"])
    assert top([[1, 5], [7, 3]], 3, batching=False) == ((3,), ["7.000000:2", "5.000000:1", "3.000000:3"])


def test_dimensions_of_a_row_are_counted_through() -> None:
    assert top([[[1, 5], [7, 3]]], 2) == ((1, 2), ["7.000000:2", "5.000000:1"])


def test_no_more_than_there_are() -> None:
    assert top([[1, 2]], 9) == ((1, 2), ["2.000000:1", "1.000000:0"])


def test_equals_in_their_order() -> None:
    assert top([[1, 1, 2, 1]], 4)[1] == ["2.000000:2", "1.000000:0", "1.000000:1", "1.000000:3"]


def test_six_decimals() -> None:
    assert top([[1e-7, 123456.789, -3.5]], 3)[1] == ["123456.789062:1", "0.000000:0", "-3.500000:2"]
    assert top([[1 / 3]], 1, datatype=dtypes.FP64)[1] == ["0.333333:0"]


def test_infinities() -> None:
    assert top([[1, math.inf, -math.inf]], 3)[1] == ["inf:1", "1.000000:0", "-inf:2"]


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        (dtypes.INT8, [-1, 1, -128], ["1:1", "-1:0", "-128:2"]),
        (dtypes.UINT8, [0, 255, 7], ["255:1", "7:2", "0:0"]),
        (dtypes.INT64, [-(2**62), 2**62, 0], [f"{2**62}:1", "0:2", f"{-(2**62)}:0"]),
        (dtypes.UINT64, [0, 2**64 - 1, 2**63], [f"{2**64 - 1}:1", f"{2**63}:2", "0:0"]),
        (dtypes.INT64, [2**62, 2**62 + 1, 2**62 - 1], [f"{2**62 + 1}:1", f"{2**62}:0", f"{2**62 - 1}:2"]),
    ],
)
def test_whole_numbers(datatype: DataType, values: list[int], expected: list[str]) -> None:
    assert top([values], 3, datatype=datatype)[1] == expected


@pytest.mark.parametrize("datatype", [dtypes.BYTES, dtypes.BOOL, dtypes.FP16, dtypes.BF16])
def test_types_that_have_no_order_here(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument) as caught:
        output_parameters.top_classes(TensorSpec("OUT", datatype, (1, 1)), b"\0\0\0\0", 1, (), batching=True)
    assert caught.value.message == (f"class result not available for output due to unsupported type '{datatype.name}'")


def test_too_large_to_sort() -> None:
    with pytest.raises(InvalidArgument) as caught:
        output_parameters.top_classes(
            TensorSpec("OUT", dtypes.UINT8, (1_000_001,)), bytes(1_000_001), 1, (), batching=False
        )
    assert caught.value.message == "classification output tensor too large"


@pytest.mark.parametrize(("shape", "expected"), [((0, 3), (0, 2)), ((2, 0), (2, 0)), ((0, 0), (0, 0))])
def test_nothing_to_sort(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    spec, data = output_parameters.top_classes(TensorSpec("OUT", dtypes.FP32, shape), b"", 2, (), batching=True)
    assert (spec.shape, bytes(data)) == (expected, b"")


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=8), st.integers(1, 10))
def test_always_the_largest_first(values: list[int], count: int) -> None:
    _, texts = top([values], count, datatype=dtypes.INT32)
    found = [tuple(map(int, text.split(":"))) for text in texts]
    assert found == sorted(((value, index) for index, value in enumerate(values)), key=lambda each: -each[0])[:count]
