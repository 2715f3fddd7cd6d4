"""Shapes of made-up inputs of commands: what ``--shape`` specifies, or else the first that the model accepts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from nerite.cli.command import add_repeated
from nerite.client import ClientError, TensorDescription
from nerite.client.connection import Unreachable
from nerite.client.tensors import smallest
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.sample_inputs import Sizes, plausible_shapes
from nerite.core.signature import SignatureInput
from nerite.core.tensor import Array

_Attempt = TypeVar("_Attempt")
_Answer = TypeVar("_Answer")


def shape_option(name: str, sizes: Sequence[int]) -> str:
    """Return the option that specifies a shape; N stands for a size that may be chosen."""
    return f"--shape {name}:{','.join('N' if size == -1 else str(size) for size in sizes)}"


def chosen_shapes(shapes: Mapping[str, Sizes]) -> str:
    """Return a line about the sizes that were chosen for variable dimensions."""
    options = " ".join(shape_option(name, sizes) for name, sizes in shapes.items())
    return f"Variable dimensions were given the sizes {options}; specify others likewise."


def add_shape_option(parser: argparse._ActionsContainer) -> None:
    """Add the option ``--shape``."""
    meaning = (
        "shape, without the batch, of a made-up input with variable dimensions, such as pixels:3,224,224 "
        "(default: plausible sizes, which are printed)"
    )
    add_repeated(parser, "--shape", "INPUT:SIZES", meaning, _given_shape)


def _given_shape(text: str) -> tuple[str, Sizes]:
    """Parse ``INPUT:N,N``, the form of perf_analyzer. Raises ``ArgumentTypeError``."""
    name, colon, sizes = text.rpartition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if not colon or not name or any(size < 0 for size in shape):
        raise argparse.ArgumentTypeError(f"'{text}' is not a shape: write INPUT:3,224,224")
    return name, shape


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the inputs."""

    batch: int = 0
    """Batch size; 0 for a model without batching, whose shapes have no batch dimension."""
    given: Mapping[str, Sizes] = field(default_factory=dict)
    """Shapes given by the user, without the batch dimension."""

    def of(self, tensor: TensorDescription) -> Sizes:
        """Return the shape of an input without the batch: as given, or else with 1 for variable dimensions.

        Raises ``InvalidArgument``.
        """
        own = tensor.shape[1:] if self.batch else tensor.shape
        given = self.given.get(tensor.name)
        if given is None:
            return smallest(TensorDescription(tensor.name, tensor.datatype, own))
        if len(given) != len(own) or any(size not in (-1, wanted) for size, wanted in zip(own, given, strict=True)):
            hint = " (shapes are given without the batch dimension)" if self.batch else ""
            fitting = next(shapes_to_try([tensor], batching=self.batch > 0, given={}))[tensor.name]
            raise InvalidArgument(
                f"{shape_option(tensor.name, given)} does not fit the input {tensor}{hint}.\n"
                f"    Write for example {shape_option(tensor.name, fitting)}"
            )
        return given

    def batched(self, element: Array) -> Array:
        """Repeat an element to fill a batch."""
        return np.stack([element] * self.batch) if self.batch else element


def check_shapes(given: Mapping[str, Sizes], inputs: Sequence[TensorDescription], *, batching: bool) -> None:
    """Raise ``InvalidArgument`` for a shape of an unknown input, or one that does not fit its input."""
    known = {tensor.name: tensor for tensor in inputs}
    for name, sizes in given.items():
        if name not in known:
            raise InvalidArgument(
                f"{shape_option(name, sizes)}: there is no input '{name}' to make up.\n"
                f"    Inputs: {', '.join(map(str, inputs)) or 'none'}."
            )
        Shapes(int(batching), given).of(known[name])


def variable_inputs(
    inputs: Sequence[TensorDescription], given: Collection[str], *, batching: bool
) -> list[TensorDescription]:
    """Return the inputs with variable dimensions, besides the batch, for which no shape was given."""
    return [tensor for tensor in inputs if tensor.name not in given and -1 in tensor.shape[batching:]]


def is_enlarged(tensor: TensorDescription, sizes: Sizes, *, batching: bool) -> bool:
    """Return whether a variable dimension of an input has a size other than 1 in a shape."""
    return any(own == -1 and size != 1 for own, size in zip(tensor.shape[batching:], sizes, strict=True))


def first_answered(attempts: Iterable[_Attempt], ask: Callable[[_Attempt], _Answer]) -> tuple[_Attempt, _Answer]:
    """Return the first attempt for which ``ask`` succeeds, and its result. Raises the first ``ClientError``."""
    refusal: ClientError | None = None
    for attempt in attempts:
        try:
            return attempt, ask(attempt)
        except ClientError as error:
            if not may_be_of_shape(error):
                raise
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def may_be_of_shape(error: ClientError) -> bool:
    """Return whether another shape may avoid an error. gRPC has no status."""
    return error.status in (None, 400, 500) and not isinstance(error, Unreachable)


def sizes_advice(free: Sequence[TensorDescription], *, batching: bool) -> str:
    """Return the remedy for a model that fails with made-up inputs, some of which have variable dimensions."""
    options = " ".join(shape_option(tensor.name, tensor.shape[batching:]) for tensor in free)
    return f"If it needs other sizes, specify them: {options}"


def shapes_to_try(
    inputs: Sequence[TensorDescription], *, batching: bool, given: Mapping[str, Sizes]
) -> Iterator[dict[str, Sizes]]:
    """Yield shapes of all inputs to try, as ``plausible_shapes`` does for declared inputs."""
    declared = [
        SignatureInput(tensor.name, dtypes.BY_NAME[tensor.datatype], tuple(tensor.shape[batching:]))
        for tensor in inputs
    ]
    return plausible_shapes(declared, batching=batching, given=given)
