"""Tensors as people write them, and random data of their shapes."""

from __future__ import annotations

import pytest

from nerite.client import ClientError, TensorDescription
from nerite.config.model_config import ModelConfig, ModelTensorReshape
from nerite.tools.add.destination import declared
from nerite.tools.bench.requests import Shapes, made_up_data

X = TensorDescription("x", "FP32", (-1, 3, -1))
Y = TensorDescription("y", "INT64", (-1,))
FIXED = TensorDescription("z", "BYTES", (2,))


def test_the_batch_is_in_front() -> None:
    config = declared(ModelConfig(backend="pytorch"), [X], [Y])
    assert (config.backend, config.max_batch_size) == ("pytorch", 4)
    assert (config.input[0].data_type, config.input[0].dims, config.input[0].reshape) == ("TYPE_FP32", (3, -1), None)
    assert (config.output[0].dims, config.output[0].reshape) == ((1,), ModelTensorReshape())


def test_one_tensor_without_a_batch_and_there_is_none() -> None:
    config = declared(ModelConfig(), [X], [FIXED])
    assert config.max_batch_size == 0
    assert (config.input[0].dims, config.output[0].dims) == ((-1, 3, -1), (2,))


def test_random_data() -> None:
    assert made_up_data([X], Shapes(4))["x"].shape == (4, 3, 1)
    assert made_up_data([X], Shapes(4, {"x": (3, 128)}))["x"].shape == (4, 3, 128)
    assert {name: value.shape for name, value in made_up_data([X, FIXED], Shapes()).items()} == {
        "x": (1, 3, 1),
        "z": (2,),
    }
    for wrong in ((2, 128), (3,), (3, 1, 1)):
        with pytest.raises(ClientError, match=r"input x .*: the shape .* does not fit .*without the batch dimension"):
            made_up_data([X], Shapes(4, {"x": wrong}))
