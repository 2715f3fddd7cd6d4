"""Tensors as people write them, and random data of their shapes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nerite.client import ClientError, ModelDescription, TensorDescription
from nerite.config.model_config import ModelConfig, ModelTensorReshape
from nerite.core.errors import InvalidArgument
from nerite.tools.add.destination import declared
from nerite.tools.bench.requests import TensorLoad, made_up_data, sized
from nerite.tools.bench.session import BenchedServer
from nerite.tools.trial_inputs import Shapes
from nerite.wire.grpc_service import ModelInferRequest

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
        with pytest.raises(InvalidArgument, match=r"--shape x:.* does not fit .*without the batch dimension"):
            made_up_data([X], Shapes(4, {"x": wrong}))


class Picky:
    """A server, over gRPC, with a model that takes inputs of up to so many elements."""

    def __init__(self, tensor: TensorDescription, most: int, **config: Any) -> None:
        self._model = ModelDescription("m", ("1",), "", (tensor,), ())
        self._most = most
        self._config = config
        self.asked: list[Any] = []

    def model(self, name: str, version: str = "") -> ModelDescription:
        return self._model

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        return self._config

    def infer(self, request: bytes) -> None:
        message = ModelInferRequest.FromString(request[5:])
        self.asked.append(message)
        if message.inputs[0].shape[-1] > self._most:
            raise ClientError("status 3: too large")


def of(server: Picky, **wanted: Any) -> dict[str, tuple[int, ...]]:
    return dict(sized(TensorLoad("m", **wanted), cast(BenchedServer, server)).shapes)


def test_sizes_of_a_load_are_those_that_the_model_accepts() -> None:
    server = Picky(TensorDescription("x", "FP32", (-1, -1)), 64, max_batch_size=8)
    assert of(server, batch=4) == {"x": (64,)}
    assert [list(each.inputs[0].shape) for each in server.asked] == [[1, 128], [1, 64]]
    # What is given, or not made up, is not tried.
    assert of(server, shapes={"x": (7,)}) == {"x": (7,)}
    assert of(server, streaming=True) == {}
    assert len(server.asked) == 2


def test_a_sequence_is_tried_as_a_whole() -> None:
    server = Picky(Y, 128)
    assert of(server, sequence_length=5, first_id=7) == {"y": (128,)}
    parameters = server.asked[0].parameters
    assert parameters["sequence_start"].bool_param and parameters["sequence_end"].bool_param


def test_a_load_that_is_never_accepted_names_the_option() -> None:
    with pytest.raises(ClientError, match=r"too large\n    If it needs other sizes, specify them: --shape y:N"):
        of(Picky(Y, 0))
    with pytest.raises(InvalidArgument, match="there is no input 'z' to make up"):
        of(Picky(Y, 9), shapes={"z": (1,)})
