"""Sizes that models with variable dimensions are measured with, and refusals of shapes that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from nerite.client import ClientError, TensorDescription
from nerite.client.connection import Unreachable
from nerite.core.errors import InvalidArgument
from nerite.tools.trial_inputs import (
    Shapes,
    check_shapes,
    first_answered,
    shape_option,
    shapes_to_try,
    variable_inputs,
)


def tensor(name: str, *shape: int, datatype: str = "FP32") -> TensorDescription:
    return TensorDescription(name, datatype, shape)


@pytest.mark.parametrize(
    ("shape", "tried"),
    [
        ((-1, 3, -1, -1), [(3, 224, 224), (3, 320, 320), (3, 640, 640), (3, 32, 32), (3, 1, 1)]),
        ((-1, -1, -1, 3), [(224, 224, 3), (320, 320, 3), (640, 640, 3), (32, 32, 3), (1, 1, 3)]),
        ((-1, -1, -1, -1), [(3, 224, 224), (3, 320, 320), (3, 640, 640), (3, 32, 32), (1, 1, 1)]),
        ((-1, 3, 48, -1), [(3, 48, 320), (3, 48, 224), (3, 48, 640), (3, 48, 32), (3, 48, 1)]),
        ((-1, 1, -1, 512), [(1, 512, 512), (1, 224, 512), (1, 640, 512), (1, 32, 512), (1, 1, 512)]),
        ((-1, -1), [(128,), (64,), (32,), (16,), (1,)]),
        ((-1, -1, 80), [(128, 80), (64, 80), (32, 80), (16, 80), (1, 80)]),
        ((-1, 3, 224, 224), [(3, 224, 224)]),
        ((-1, 4), [(4,)]),
    ],
    ids=str,
)
def test_with_batches(shape: tuple[int, ...], tried: list[tuple[int, ...]]) -> None:
    assert [each["x"] for each in shapes_to_try([tensor("x", *shape)], batching=True, given={})] == tried


@pytest.mark.parametrize(
    ("shape", "first"),
    [((-1, 3, -1, -1), (1, 3, 224, 224)), ((1, 3, -1, -1), (1, 3, 224, 224)), ((-1, -1), (1, 128)), ((-1,), (128,))],
    ids=str,
)
def test_without_batches_a_leading_one_is_that_of_a_request(shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    assert next(shapes_to_try([tensor("x", *shape)], batching=False, given={}))["x"] == first


def test_tokens_of_all_inputs_are_as_many() -> None:
    inputs = [tensor(name, -1, -1, datatype="INT64") for name in ("input_ids", "attention_mask")]
    attempts = list(shapes_to_try(inputs, batching=True, given={}))
    assert attempts[0] == {"input_ids": (128,), "attention_mask": (128,)}
    assert attempts[-1] == {"input_ids": (1,), "attention_mask": (1,)}


def test_texts_and_given_shapes_stay() -> None:
    inputs = [tensor("text", -1, -1, datatype="BYTES"), tensor("x", -1, -1)]
    assert list(shapes_to_try(inputs, batching=True, given={"x": (7,)})) == [{"text": (1,), "x": (7,)}]
    assert variable_inputs(inputs, {"x"}, batching=True) == inputs[:1]


def test_the_option_is_one_that_can_be_passed() -> None:
    assert shape_option("x", (3, 224, 224)) == "--shape x:3,224,224"
    assert shape_option("x", (3, -1, -1)) == "--shape x:3,N,N"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"y": (1,)}, "--shape y:1: there is no input 'y' to make up.\n    Inputs: x (FP32 [-1, 3, -1, -1])."),
        (
            {"x": (1, 3, 8, 8)},
            "--shape x:1,3,8,8 does not fit the input x (FP32 [-1, 3, -1, -1]) (shapes are given without the batch",
        ),
        ({"x": (4, 8, 8)}, "Write for example --shape x:3,224,224"),
    ],
)
def test_a_misfit_is_refused(given: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_shapes(given, [tensor("x", -1, 3, -1, -1)], batching=True)
    assert says in caught.value.message


def test_what_fits_is_not() -> None:
    check_shapes({"x": (3, 8, 9)}, [tensor("x", -1, 3, -1, -1)], batching=True)
    check_shapes({"x": (2, 3)}, [tensor("x", -1, 3)], batching=False)


def test_the_first_shape_that_is_answered() -> None:
    def ask(size: int) -> str:
        if size > 2:
            raise ClientError(f"{size} is too large", 400)
        return "ok"

    assert first_answered([9, 2, 1], ask) == (2, "ok")
    with pytest.raises(ClientError, match="9 is too large"):
        first_answered([9, 8], ask)


@pytest.mark.parametrize("error", [ClientError("busy", 429), ClientError("unknown", 404), Unreachable("gone")])
def test_what_no_shape_avoids_ends_the_attempts(error: ClientError) -> None:
    asked = []

    def ask(size: int) -> None:
        asked.append(size)
        raise error

    with pytest.raises(type(error), match=str(error)):
        first_answered([3, 2, 1], ask)
    assert asked == [3]


@pytest.mark.parametrize("batch", [0, 3])
def test_shapes_of_a_batch(batch: int) -> None:
    wanted = (-1, 3) if batch else (3,)
    assert Shapes(batch).of(tensor("x", *wanted)) == (3,)
    assert Shapes(batch).batched(np.zeros(3)).shape == ((3, 3) if batch else (3,))
