"""What is sent as inputs: made up, or read from files in the forms that perf_analyzer reads."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nerite.client import ClientError, Model, TensorDescription
from nerite.client.random_value import random_value, smallest
from nerite.core import dtype as dtypes
from nerite.core.tensor import Array, TensorSpec, to_array

Request = Mapping[str, Array]
"""The inputs of a request by name."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What shape each input has."""

    batch: int = 0
    """How many elements a batch has; 0 for a model without batches, whose shapes have no dimension for them."""
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes for inputs, without the dimension of the batch."""

    def of(self, tensor: TensorDescription) -> tuple[int, ...]:
        """Return the shape of an input, without the dimension of the batch. Raises ``ClientError``."""
        own = tensor.shape[1:] if self.batch else tensor.shape
        given = self.given.get(tensor.name)
        if given is None:
            return smallest(TensorDescription(tensor.name, tensor.datatype, own))
        if len(given) != len(own) or any(size not in (-1, wanted) for size, wanted in zip(own, given, strict=True)):
            raise ClientError(f"input {tensor}: a shape of {list(given)} does not fit{self._hint}")
        return given

    @property
    def _hint(self) -> str:
        return " (shapes are given without the dimension of the batch)" if self.batch else ""

    def batched(self, element: Array) -> Array:
        """Return as many of it as a batch has."""
        return np.stack([element] * self.batch) if self.batch else element


def made_up(inputs: Iterable[TensorDescription], shapes: Shapes, *, zero: bool = False) -> Request:
    """Return random data, or zeros and empty texts."""
    made = {}
    for tensor in inputs:
        shape = (shapes.batch, *shapes.of(tensor)) if shapes.batch else shapes.of(tensor)
        made[tensor.name] = random_value(tensor, shape) if not zero else _zeros(tensor, shape)
    return made


def _zeros(tensor: TensorDescription, shape: tuple[int, ...]) -> Array:
    if tensor.datatype == "BYTES":
        return np.full(shape, b"", object)
    # Words of BF16 are written as the numbers they stand for.
    return np.zeros(shape, np.float32 if tensor.datatype == "BF16" else dtypes.BY_NAME[tensor.datatype].numpy)


def read(path: Path, model: Model, shapes: Shapes) -> list[list[Request]]:
    """Return the requests in a file or a directory, as sequences of one or several. Raises ``ClientError``."""
    try:
        if path.is_dir():
            return [[_from_directory(path, model, shapes)]]
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ClientError(f"the data in {error.filename} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ClientError(f"the data in {path} are no JSON: {error}") from None
    sequences = document.get("data") if isinstance(document, dict) else None
    if not isinstance(sequences, list) or not sequences:
        raise ClientError(f'{path} is no data: write {{"data": [{{"INPUT": [values], ...}}, ...]}}')
    sequences = [entry if isinstance(entry, list) else [entry] for entry in sequences]
    described = {tensor.name: tensor for tensor in model.inputs}
    return [
        [_request(entry, described, shapes, f"{path}, data {at}") for entry in sequence]
        for at, sequence in enumerate(sequences)
    ]


def _request(entry: Any, described: Mapping[str, TensorDescription], shapes: Shapes, place: str) -> Request:
    if not isinstance(entry, dict):
        raise ClientError(
            f'{place}: write {{"INPUT": [values], ...}} for each request. The inputs: {", ".join(described)}'
        )
    found = {}
    for name, value in entry.items():
        if name not in described:
            raise ClientError(f"{place}: there is no input '{name}'. The inputs: {', '.join(described)}")
        try:
            found[name] = shapes.batched(_value(value, described[name], shapes))
        except (ValueError, TypeError) as error:
            raise ClientError(f"{place}, input {described[name]}: {error}") from None
    return found


def _value(value: Any, tensor: TensorDescription, shapes: Shapes) -> Array:
    shape: Sequence[int] = ()
    if isinstance(value, dict):
        shape = value.get("shape", ())
        if "b64" in value:
            return _from_bytes(base64.b64decode(value["b64"]), tensor, tuple(shape) or shapes.of(tensor))
        if "content" not in value:
            raise ValueError('write [values], {"content": [values], "shape": [sizes]} or {"b64": "..."}')
        value = value["content"]
        if isinstance(value, dict):
            return _from_bytes(base64.b64decode(value["b64"]), tensor, tuple(shape) or shapes.of(tensor))
    # BF16 has no array type of its own: numbers of FP32 are shortened when they are sent.
    kind = np.dtype(np.float32) if tensor.datatype == "BF16" else dtypes.BY_NAME[tensor.datatype].numpy
    array = np.array(value, kind).ravel()
    if not shape:
        own = tensor.shape[1:] if shapes.batch else tensor.shape
        # One size that is free follows from how many values there are.
        free = tensor.name not in shapes.given and list(own).count(-1) == 1
        shape = own if free else shapes.of(tensor)
    return array.reshape(shape)


def _from_directory(path: Path, model: Model, shapes: Shapes) -> Request:
    """Read a file for each input: its bytes, or for texts a line for each."""
    found = {}
    for tensor in model.inputs:
        content = (path / tensor.name).read_bytes()
        shape = shapes.of(tensor)
        if tensor.datatype == "BYTES":
            lines = content.splitlines()[: math.prod(shape)]
            if len(lines) < math.prod(shape):
                raise ClientError(f"{path / tensor.name} has {len(lines)} lines, but {tensor} needs {math.prod(shape)}")
            found[tensor.name] = shapes.batched(np.array(lines, object).reshape(shape))
        else:
            found[tensor.name] = shapes.batched(_from_bytes(content, tensor, shape))
    return found


def _from_bytes(content: bytes, tensor: TensorDescription, shape: tuple[int, ...]) -> Array:
    spec = TensorSpec(tensor.name, dtypes.BY_NAME[tensor.datatype], shape)
    if spec.byte_size not in (-1, len(content)):
        raise ClientError(
            f"input {tensor}: {len(content)} bytes are not {spec.byte_size}, as a shape of {list(shape)} has"
        )
    if tensor.datatype == "BF16":
        # In the wire form already; what makes tensors takes numbers.
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return to_array(spec, content)
