"""Sizes and values of made-up inputs: pictures, tokens, masks, and no more elements than a machine can hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nerite.core import tensor as dtypes
from nerite.core.sample_inputs import plausible_shapes, random_values, sample_shapes
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import DataType


def signature(*dims: int, batch: int = 0, datatype: DataType = dtypes.FP32) -> Signature:
    return Signature("m", batch, [SignatureInput("x", datatype, dims)], [])


@pytest.mark.parametrize(
    ("of", "first", "last"),
    [
        (signature(3, -1, -1, batch=4), (1, 3, 224, 224), (1, 3, 1, 1)),
        (signature(-1, 3, -1, -1), (1, 3, 224, 224), (1, 3, 1, 1)),
        (signature(-1, datatype=dtypes.INT64, batch=8), (1, 128), (1, 1)),
        (signature(4, batch=8), (1, 4), (1, 4)),
        (signature(-1, datatype=dtypes.BYTES), (1,), (1,)),
    ],
)
def test_sizes_of_a_sample_request(of: Signature, first: tuple[int, ...], last: tuple[int, ...]) -> None:
    shapes = [each["x"] for each in sample_shapes(of, streams=False)]
    assert (shapes[0], shapes[-1]) == (first, last)
    assert [each["x"] for each in sample_shapes(of, streams=True)] == [last]


def test_a_model_without_inputs_has_a_sample_request_too() -> None:
    assert list(sample_shapes(Signature("m", 0, [], []), streams=False)) == [{}]


@pytest.mark.parametrize("rank", range(1, 9))
def test_many_variable_dimensions_have_few_elements(rank: int) -> None:
    declared = [SignatureInput("x", dtypes.FP32, (-1,) * rank)]
    for shapes in plausible_shapes(declared, batching=True):
        assert math.prod(shapes["x"]) <= 1 << 24


@pytest.mark.parametrize(
    ("name", "datatype", "allowed"),
    [
        ("attention_mask", dtypes.INT64, {1}),
        ("Mask", dtypes.BOOL, {True}),
        ("mask", dtypes.BF16, {1.0}),
        ("token_type_ids", dtypes.INT64, {0}),
        ("input_ids", dtypes.INT32, set(range(100))),
        ("flags", dtypes.BOOL, {False, True}),
        (
            "mask_name",
            dtypes.BYTES,
            {"amber", "coral", "drift", "foam", "kelp", "pearl", "reef", "shell", "tide", "wave"},
        ),
    ],
)
def test_values_fit_the_name(name: str, datatype: DataType, allowed: set[object]) -> None:
    assert set(random_values(name, datatype, (50, 4)).flat) <= allowed


def test_pictures_use_the_whole_range() -> None:
    pixels = random_values("picture", dtypes.UINT8, (64, 64, 3))
    assert (pixels.dtype, pixels.min() < 20, pixels.max() > 235) == (np.uint8, True, True)
    fractions = random_values("picture", dtypes.FP16, (64, 64, 3))
    assert (fractions.dtype, fractions.min() >= 0, fractions.max() <= 1) == (np.float16, True, True)
