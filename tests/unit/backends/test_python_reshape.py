"""The shapes that ``reshape`` gives a model in Python, and what it may answer."""

from __future__ import annotations

import re

import pytest

from nerite.backends.python.instance import ModelReshape
from nerite.core import tensor
from nerite.core.errors import Internal
from nerite.core.request import RequestHeader
from nerite.core.tensor import TensorSpec


def reshape_of(batch: int, dims: list[int], shape: list[int]) -> ModelReshape:
    entry = {"name": "A", "data_type": "TYPE_INT32", "dims": dims, "reshape": {"shape": shape}}
    other = {"name": "B", "data_type": "TYPE_INT32", "dims": [-1]}
    return ModelReshape({"max_batch_size": batch, "input": [entry, other], "output": [entry, other]})


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, tensor.INT32, shape)


def test_a_configuration_without_any() -> None:
    assert not ModelReshape({"input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}]})


@pytest.mark.parametrize(
    ("batch", "dims", "shape", "outside", "inside"),
    [
        (0, [2, 2], [4], (2, 2), (4,)),
        (8, [2, 2], [4], (3, 2, 2), (3, 4)),
        (8, [1], [], (3, 1), (3,)),
        (0, [-1, 6, -1], [-1, 2, 3, -1], (5, 6, 7), (5, 2, 3, 7)),
        (1, [-1, -1], [1, -1, 1, -1], (1, 0, 9), (1, 1, 0, 1, 9)),
    ],
)
def test_there_and_back(
    batch: int, dims: list[int], shape: list[int], outside: tuple[int, ...], inside: tuple[int, ...]
) -> None:
    reshape = reshape_of(batch, dims, shape)
    header = RequestHeader("m", "", [spec("B", 1, 7), spec("A", *outside)])
    assert [each.shape for each in reshape.inputs(header)] == [(1, 7), inside]
    assert reshape.inputs(header) is reshape.inputs(header), "worked out once for a header"
    assert header.inputs[1].shape == outside
    assert reshape.output(spec("A", *inside)) == spec("A", *outside)
    assert reshape.output(spec("B", 1, 7)) == spec("B", 1, 7)


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 1), (3,), (4,)])
def test_an_output_of_another_shape(shape: tuple[int, ...]) -> None:
    shown = re.escape(f"[{','.join(map(str, shape))}]")
    with pytest.raises(Internal, match=f"output 'A' has the shape {shown}, .* is \\[-1,4\\]"):
        reshape_of(8, [2, 2], [4]).output(spec("A", *shape))
