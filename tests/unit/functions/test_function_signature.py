"""Signatures of functions: what becomes an input or output, and what is refused when a function is decorated."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nerite
from nerite import FunctionMistake, SequenceState
from nerite.functions.annotations import ARRAYS

N = "n"
Float32, Int64, Text = (ARRAYS[name] for name in ("Float32", "Int64", "Text"))


@dataclass
class Point:
    x: Float32[N]  # type: ignore[valid-type]
    label: str = "none"


def shapes(function: nerite.ModelFunction[..., Any], side: str) -> dict[str, tuple[str, list[int]]]:
    return {each["name"]: (each["data_type"], each["dims"]) for each in function.config()[side]}


def annotated(returns: Any, **parameters: Any) -> Callable[..., Any]:
    """Return a function with these annotations."""
    namespace: dict[str, Any] = {}
    exec(f"def function({', '.join(parameters)}): pass", namespace)
    function: Callable[..., Any] = namespace["function"]
    function.__annotations__ = {**parameters, "return": returns}
    return function


def test_a_batched_function() -> None:
    double = nerite.model(batch=64, delay=0.002)(annotated(Float32[N], x=Float32[N]))
    config = double.config()
    assert config["max_batch_size"] == 64
    assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 2000}
    assert shapes(double, "input") == {"x": ("TYPE_FP32", [-1])}
    assert shapes(double, "output") == {"output": ("TYPE_FP32", [-1])}


def test_each_kind_of_annotation() -> None:
    function = nerite.model(
        annotated(
            tuple[int, Float32[2, N]],
            number=float,
            flag=bool,
            text=str,
            data=bytes,
            words=list[str],
            image=Image.Image,
            array=Text["n", 3],
            single=Int64,
        )
    )
    assert shapes(function, "input") == {
        "number": ("TYPE_FP64", [1]),
        "flag": ("TYPE_BOOL", [1]),
        "text": ("TYPE_STRING", [1]),
        "data": ("TYPE_STRING", [1]),
        "words": ("TYPE_STRING", [-1]),
        "image": ("TYPE_STRING", [1]),
        "array": ("TYPE_STRING", [-1, 3]),
        "single": ("TYPE_INT64", [1]),
    }
    assert shapes(function, "output") == {"output_0": ("TYPE_INT64", [1]), "output_1": ("TYPE_FP32", [2, -1])}
    assert function.config()["max_batch_size"] == 0


def test_fields_of_dataclasses_are_tensors() -> None:
    function = nerite.model(annotated(Point, point=Point))
    assert shapes(function, "input") == {"x": ("TYPE_FP32", [-1]), "label": ("TYPE_STRING", [1])}
    assert shapes(function, "output") == shapes(function, "input")
    assert [each.get("optional") for each in function.config()["input"]] == [None, True]


def test_a_default_makes_an_input_optional() -> None:
    @nerite.model
    def function(a: float, b: float = 2.0, c: str | None = None) -> float:
        return a * b

    assert [each.get("optional", False) for each in function.config()["input"]] == [False, True, True]
    assert function(3.0) == 6.0


def test_generators_are_decoupled() -> None:
    @nerite.model
    def count(to: int) -> Iterator[int]:
        yield from range(to)

    @nerite.model
    async def later(to: int) -> AsyncIterator[int]:
        yield to

    assert count.config()["model_transaction_policy"] == {"decoupled": True}
    assert later.signature.asynchronous
    assert later.signature.stream
    assert list(count(3)) == [0, 1, 2]


def test_state_makes_a_sequence_model() -> None:
    @nerite.model(sequences=5)
    def total(x: float, state: SequenceState) -> float:
        return x

    assert total.config()["sequence_batching"] == {"oldest": {"max_candidate_sequences": 5}}
    assert shapes(total, "input") == {"x": ("TYPE_FP64", [1])}


def test_a_class_and_a_setup_are_prepared_once() -> None:
    created = []

    @nerite.model
    class Model:
        def __init__(self) -> None:
            created.append("class")

        def __call__(self, x: float) -> float:
            return x + 1

    @nerite.model(setup=lambda: created.append("setup") or 3.0)
    def scaled(factor: float, x: float) -> float:
        return factor * x

    assert (Model(1.0), Model(2.0)) == (2.0, 3.0)  # type: ignore[arg-type, call-arg, comparison-overlap]
    assert (scaled(1.0), scaled(2.0)) == (3.0, 6.0)  # type: ignore[call-arg]
    assert created == ["class", "setup"]
    assert list(shapes(scaled, "input")) == ["x"]


def test_further_configuration() -> None:
    function = nerite.model(config={"response_cache": {"enable": True}})(annotated(float, x=float))
    assert function.config()["response_cache"] == {"enable": True}


@pytest.mark.parametrize(
    ("function", "settings", "told"),
    [
        (
            annotated(Float32["n"], x=dict),
            {},
            "parameter 'x' of function() has the annotation dict, which cannot be sent",
        ),
        (annotated(None, x=float), {}, "does not say what it returns: add ->"),
        (annotated(float), {}, "has no inputs: give it a parameter"),
        (annotated(float, x=float), {"batch": 8}, "annotate it with list[float] (or nerite.Float64, for an array)"),
        (annotated(float, x=Float32), {"batch": 8}, "what function() returns has the annotation float"),
        (annotated(float, x=float, y=float | None), {}, "may be None: give it the default None"),
        (annotated(float, x=float), {"sequences": 3}, "no parameter for their state"),
        (annotated(float, x=float, a=SequenceState, b=SequenceState), {}, "'a' receives the state"),
        (annotated(float, x=float), {"batch": -1}, "batch=-1 of function() must be an integer of 0 or more"),
        (annotated(float, x=float), {"delay": 1.0}, "how long requests wait for a batch: add batch="),
        (annotated(float, x=float), {"name": "a/b"}, "is not a name for a model"),
        (annotated(float, x=float), {"config": {"input": []}}, "which follows from the function"),
        (annotated(float, x=float, point=Point, label=str), {}, "have the name 'x': rename one"),
        (annotated("Unknown", x=float), {}, "cannot be read: NameError"),
        (annotated(float), {"setup": list}, "needs a first parameter, which receives what setup returned"),
        (lambda x: x, {}, "has no name and no annotations: define it with def"),
    ],
)
def test_mistakes_are_told_at_decoration(function: Callable[..., Any], settings: dict[str, Any], told: str) -> None:
    with pytest.raises(FunctionMistake, match=re.escape(told)):
        nerite.model(**settings)(function)


def test_a_generator_has_no_batch() -> None:
    def count(x: Float32[N]) -> Iterator[Float32[N]]:  # type: ignore[valid-type]
        yield x

    with pytest.raises(FunctionMistake, match="answers one request with a stream: leave out batch=8"):
        nerite.model(batch=8)(count)


def test_a_class_without_call_or_with_arguments() -> None:
    class Silent:
        pass

    class Wanting:
        def __init__(self, path: str) -> None:
            pass

        def __call__(self, x: float) -> float:
            return x

    with pytest.raises(FunctionMistake, match="without __call__"):
        nerite.model(Silent)
    with pytest.raises(FunctionMistake, match="needs 'path'"):
        nerite.model(Wanting)


@pytest.mark.parametrize("dims", [0, -2, 1.5, "a b", ("n", None), True])
def test_dimensions_that_there_are_not(dims: Any) -> None:
    with pytest.raises(FunctionMistake):
        Float32[dims]


def test_what_is_imported_with_the_package() -> None:
    assert "Float32" in dir(nerite)
    assert np.dtype(Float32.numpy) == np.float32
    with pytest.raises(AttributeError, match="no attribute 'float32'"):
        nerite.float32  # type: ignore[attr-defined]  # noqa: B018
