"""Inputs as people write them on a command line, and what is made up for them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import numpy as np
import pytest

from nerite.cli.command import UsageError
from nerite.client import ModelDescription, TensorDescription
from nerite.client.tensors import random_value, to_tensor
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import DataType
from nerite.tools.client_infer import advice, parameter, random_inputs, read_inputs
from nerite.tools.trial_inputs import add_shape_option

NUMBERS = TensorDescription("numbers", "FP32", (-1, 3))
PROMPT = TensorDescription("prompt", "BYTES", (-1, 1))
IMAGE = TensorDescription("image", "UINT8", (-1,))
MODEL = ModelDescription("m", ("1",), "python", (NUMBERS, PROMPT, IMAGE), ())


def read(word: str) -> object:
    """Return the one value that a word gives."""
    (value,) = read_inputs(MODEL, [word]).values()
    return value


def refused(word: str) -> str:
    with pytest.raises(UsageError) as error:
        read(word)
    return f"{error.value.text} {error.value.remedy}"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("numbers=[1, 2.5, 3]", [1, 2.5, 3]),
        ("numbers=7", 7),
        ("prompt=hello", "hello"),
        ("prompt=a=b", "a=b"),
        ("prompt=", ""),
        ('prompt="hello"', "hello"),
        ('prompt=["a", "b"]', ["a", "b"]),
        ('prompt=[["a"], ["b"]]', [["a"], ["b"]]),
        ("prompt=[1, 2]", "[1, 2]"),
        ("prompt=42", "42"),
        ('prompt="@you"', "@you"),
    ],
)
def test_values(word: str, value: object) -> None:
    assert read(word) == value


def test_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "picture.png").write_bytes(b"\xff\x00")
    array = read(f"numbers=@{tmp_path}/a.npy")
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [0, 1, 2]
    assert read(f"prompt=@{tmp_path}/picture.png") == b"\xff\x00"
    pixels = read(f"image=@{tmp_path}/picture.png")
    assert isinstance(pixels, np.ndarray)
    assert pixels.tolist() == [255, 0]
    assert "Save the array with numpy.save" in refused(f"numbers=@{tmp_path}/picture.png")
    assert "No such file or directory" in refused(f"numbers=@{tmp_path}/none")
    (tmp_path / "b.npy").write_bytes(b"no array")
    assert "cannot read an array from" in refused(f"numbers=@{tmp_path}/b.npy")


def test_mistakes() -> None:
    assert refused("hello") == "'hello' is not an input. Write it as NAME=VALUE."
    assert refused("number=1") == "model 'm' has no input 'number'. Did you mean 'numbers'?"
    assert refused("zzz=1") == "model 'm' has no input 'zzz'. Its inputs: numbers, prompt, image."
    assert refused("numbers=one").startswith("input numbers (FP32 [-1, 3]): 'one' is not JSON. Write numbers as JSON")


def test_parameters() -> None:
    assert [parameter(word) for word in ("a=1", "b=true", "c=text", "d=x=y", 'e="1"')] == [
        ("a", 1),
        ("b", True),
        ("c", "text"),
        ("d", "x=y"),
        ("e", "1"),
    ]
    with pytest.raises(ValueError, match="word"):
        parameter("word")


@pytest.mark.parametrize("datatype", dtypes.ALL, ids=lambda datatype: datatype.name)
def test_random_data_fits(datatype: DataType) -> None:
    tensor = TensorDescription("X", datatype.name, (-1, 3))
    converted, array = to_tensor(tensor, random_value(tensor))
    assert (converted, array.shape) == (datatype, (1, 3))


def test_the_example_is_a_command_that_works() -> None:
    text = advice(MODEL, MODEL.inputs, [PROMPT], "gpu:8000")
    assert text.splitlines()[:2] == ["Missing inputs:", "  prompt (BYTES [-1, 1])"]
    command = next(line for line in text.splitlines() if line.startswith("Example:")).removeprefix("Example:")
    program, words = shlex.split(command)[:6], shlex.split(command)[6:]
    assert program == ["nerite", "client", "--url", "gpu:8000", "infer", "m"]
    assert read_inputs(MODEL, words) == {"numbers": [[0, 0, 0]], "prompt": "text", "image": [0]}
    assert text.endswith("nerite client --url gpu:8000 infer m --random")


def test_no_example_of_what_nobody_would_write() -> None:
    picture = TensorDescription("picture", "FP32", (3, 224, 224))
    text = advice(ModelDescription("m", (), "", (picture,), ()), [picture], [picture], "localhost:8000")
    assert "Example" not in text
    assert "nerite client infer m --random" in text


def test_shapes_of_random_data() -> None:
    made = random_inputs([NUMBERS, IMAGE], {"numbers": (2, 3), "image": (5,)}, batching=False)
    assert {name: np.shape(value) for name, value in made.items()} == {"numbers": (2, 3), "image": (5,)}
    assert np.shape(random_inputs([NUMBERS], {"numbers": (3,)}, batching=True)["numbers"]) == (1, 3)
    with pytest.raises(InvalidArgument, match="--shape numbers:2,3 does not fit the input numbers"):
        random_inputs([NUMBERS], {"numbers": (2, 3)}, batching=True)


@pytest.mark.parametrize(("text", "shape"), [("scope/x:0:3,224", ("scope/x:0", (3, 224))), ("x:", ("x", ()))])
def test_shapes_on_the_command_line(text: str, shape: tuple[str, tuple[int, ...]]) -> None:
    parser = argparse.ArgumentParser()
    add_shape_option(parser)
    assert parser.parse_args(["--shape", text]).shape == [shape]


def test_which_models_generate_text() -> None:
    prompt, text = TensorDescription("text_input", "BYTES", (1,)), TensorDescription("text_output", "BYTES", (1,))
    vector, picture = TensorDescription("embedding", "FP32", (4,)), TensorDescription("image", "UINT8", (-1,))

    def generates(*outputs: TensorDescription) -> bool:
        return ModelDescription("m", ("1",), "llm", (prompt, IMAGE), outputs).generates_text

    assert generates(text)
    assert not generates(text, vector)
    assert not generates(vector)
    assert not generates(picture)
    assert not ModelDescription("m", ("1",), "asr", (IMAGE,), (text,)).generates_text
