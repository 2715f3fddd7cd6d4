"""Values of functions: from tensors to arguments, and from results to tensors."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nerite.functions import values
from nerite.functions.annotations import ARRAYS, SequenceState
from nerite.functions.execution import FunctionStates
from nerite.functions.signature import FunctionSignature, read_signature
from nerite.functions.values import BadRequest, WrongResult, arguments_of, check_dimensions, results_of

Float32, Int64, Text = (ARRAYS[name] for name in ("Float32", "Int64", "Text"))


def signature(returns: Any, batch: int = 0, **parameters: Any) -> FunctionSignature:
    namespace: dict[str, Any] = {}
    exec(f"def function({', '.join(parameters)}): pass", namespace)
    function = namespace["function"]
    function.__annotations__ = {**parameters, "return": returns}
    return read_signature(function, "function", batch=batch, given=0)


def strings(*elements: bytes, shape: tuple[int, ...] = (-1,)) -> np.ndarray[Any, Any]:
    return np.array(elements, object).reshape(shape)


def test_single_values() -> None:
    known = signature(float, text=str, number=int, words=list[str], array=Float32["n"], one=Float32)
    given = {
        "text": strings("é".encode()),
        "number": np.array([3]),
        "words": strings(b"a", b"b"),
        "array": np.ones(2, np.float32),
        "one": np.array([2.5], np.float32),
    }
    found = arguments_of(known, given, None, batched=False)
    assert found["text"] == "é"
    assert found["number"] == 3
    assert found["words"] == ["a", "b"]
    assert found["array"].tolist() == [1, 1]
    assert found["one"] == np.float32(2.5)


def test_batches() -> None:
    known = signature(list[str], 8, text=list[str], words=list[list[str]], one=Float32)
    given = {
        "text": strings(b"a", b"b", shape=(2, 1)),
        "words": strings(b"a", b"b", b"c", b"d", shape=(2, 2)),
        "one": np.array([[1], [2]], np.float32),
    }
    found = arguments_of(known, given, None, batched=True)
    assert found["text"] == ["a", "b"]
    assert found["words"] == [["a", "b"], ["c", "d"]]
    assert found["one"].tolist() == [1, 2]
    assert results_of(known, ["x", "y"], {}, 2)["output"].tolist() == [["x"], ["y"]]


def test_text_that_is_not_utf_8() -> None:
    with pytest.raises(BadRequest, match="input 'text' is not UTF-8: invalid start byte at byte 1"):
        arguments_of(signature(str, text=str), {"text": strings(b"a\xff")}, None, batched=False)


def picture(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def test_images() -> None:
    known = signature(Image.Image, image=Image.Image)
    found = arguments_of(known, {"image": strings(picture(4, 3))}, None, batched=False)
    assert found["image"].size == (4, 3)
    (sent,) = results_of(known, found["image"], {}, None)["output"]
    assert Image.open(io.BytesIO(sent)).size == (4, 3)
    with pytest.raises(BadRequest, match="is not an image file"):
        arguments_of(known, {"image": strings(b"GIF89a")}, None, batched=False)


def test_large_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_PIXELS", 11)
    with pytest.raises(BadRequest, match="4 x 3 pixels, more than 11"):
        arguments_of(signature(str, image=Image.Image), {"image": strings(picture(4, 3))}, None, batched=False)


def test_named_dimensions_are_equal() -> None:
    known = signature(Float32["n"], a=Float32["n"], b=Float32["n", "m"])
    given = {"a": np.ones(2, np.float32), "b": np.ones((2, 5), np.float32)}
    assert check_dimensions(known, given, batched=False) == {"n": 2, "m": 5}
    given["a"] = np.ones(3, np.float32)
    with pytest.raises(BadRequest, match="dimension 'n' is 3 in input 'a' and 2 in input 'b'"):
        check_dimensions(known, given, batched=False)


@pytest.mark.parametrize(
    ("returns", "batch", "returned", "told"),
    [
        (Float32["n"], 0, np.ones(2), "has the type float64, and declares Float32['n']: return .astype('float32')"),
        (Float32["n"], 0, np.ones((2, 2), np.float32), "has the shape [2,2], and declares Float32['n']"),
        (Float32["n"], 0, np.ones(3, np.float32), "where 'n' is 2"),
        (Float32["n"], 8, np.ones((3, 2), np.float32), "dimension 0 must be the batch, of 2 rows"),
        (Float32[4], 0, np.ones(3, np.float32), "has the shape [3], and declares Float32[4]"),
        (Float32["n"], 0, None, "returned None"),
        (int, 0, 1.5, "'output' is 1.5, and declares Int64"),
        (str, 0, 3, "has the element 3"),
        (tuple[int, int], 0, 3, "declares a tuple of 2"),
        (Image.Image, 0, 3, "where it declares an image"),
    ],
)
def test_results_that_do_not_fit(returns: Any, batch: int, returned: Any, told: str) -> None:
    with pytest.raises(WrongResult, match=re.escape(told)):
        results_of(signature(returns, batch, x=Float32["n"]), returned, {"n": 2}, 2 if batch else None)


def test_python_values_are_converted() -> None:
    assert results_of(signature(Float32["n"], x=float), [1, 2.5], {}, None)["output"].dtype == np.float32
    assert results_of(signature(float, x=float), 3, {}, None)["output"].tolist() == [3.0]


def test_states_last_as_long_as_their_sequences() -> None:
    states = FunctionStates(2)
    first = states.take(1, start=True, end=False)
    first["sum"] = 5
    assert states.take(1, start=False, end=False) is first
    assert states.take(1, start=False, end=True)["sum"] == 5
    assert len(states) == 0
    assert states.take(1, start=True, end=False) == {}


def test_the_number_of_states_is_bounded() -> None:
    states = FunctionStates(2)
    kept = [states.take(name, start=True, end=False) for name in ("a", "b", "c")]
    assert len(states) == 2
    assert states.take("c", start=False, end=False) is kept[2]
    assert isinstance(states.take("a", start=False, end=False), SequenceState)
    assert states.take("a", start=False, end=False) is not kept[0]
