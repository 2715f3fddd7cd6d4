"""From what a caller has to the tensor that a model wants: data type and shape, and nothing lost on the way.

A list has no precision: its fractions are rounded to the type of the model. An array has one, and is converted only if
every value survives; who wants it rounded says so with ``astype``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from nerite.client.connection import ClientError, HttpAnswer
from nerite.client.models import ModelDescription, TensorDescription
from nerite.core import tensor as dtypes
from nerite.core.tensor import Array, Buffer, DataType, TensorSpec, buffer_of, encode_bytes, to_array


def to_tensor(described: TensorDescription, value: object) -> tuple[DataType, Array]:
    """Return ``value`` as ``described`` wants it: BYTES as objects, BF16 as its 16-bit words.

    Dimensions of size 1 are added where they are missing, at the front if that fits, so that a single element makes
    a batch. Raises ``ClientError``.
    """
    datatype = dtypes.BY_NAME.get(described.datatype)
    if datatype is None:
        raise ClientError(f"input {described}: there is no data type {described.datatype}")
    array = _texts(described, value) if datatype is dtypes.BYTES else _numbers(described, datatype, value)
    shape = fit(array.shape, described.shape)
    if shape is None:
        raise ClientError(f"input {described}: a value of shape {list(array.shape)} does not fit")
    return datatype, array.reshape(shape)


def fit(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return ``shape`` with as many ones as it takes to be a shape that is wanted; None where no number does."""
    missing = len(wanted) - len(shape)
    for leading in range(missing, -1, -1):
        candidate = (1,) * leading + tuple(shape) + (1,) * (missing - leading)
        if all(size in (-1, given) for size, given in zip(wanted, candidate, strict=True)):
            return candidate
    return None


def widened(words: Array) -> Array:
    """Return the 16-bit words of BF16 as FP32, which loses nothing."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def _texts(described: TensorDescription, value: object) -> Array:
    array = np.array(value, object)
    for element in array.flat:
        if not isinstance(element, str | bytes):
            raise ClientError(f"input {described}: {element!r} is neither text nor bytes")
    return array


def _numbers(described: TensorDescription, datatype: DataType, value: object) -> Array:
    try:
        given = np.asarray(value)
    except ValueError:
        raise ClientError(f"input {described}: the rows of the value are not of one length") from None
    if datatype is dtypes.BF16 and given.dtype.name == "bfloat16":
        return given.view(np.uint16)
    if given.dtype.kind not in "biuf":
        wrong = next((element for element in given.astype(object).flat if not isinstance(element, int | float)), value)
        raise ClientError(f"input {described}: {wrong!r} is no number of that type")
    wanted = np.dtype(np.float32) if datatype is dtypes.BF16 else datatype.numpy
    with np.errstate(all="ignore"):
        converted = given.astype(wanted)
        if datatype is dtypes.BF16:
            converted = widened(_shortened(converted))
        lossless = _survived(given, converted)
    precise = isinstance(value, np.ndarray | np.generic)
    if not precise and given.dtype.kind == converted.dtype.kind == "f":
        lossless |= np.isfinite(converted)
    if not lossless.all():
        first = given.flat[int(np.argmin(lossless))]
        remedy = f" To have it rounded, pass array.astype(numpy.{wanted.name})." if precise else ""
        raise ClientError(f"input {described}: {first!s} cannot be converted without loss.{remedy}")
    return _shortened(converted) if datatype is dtypes.BF16 else converted


def _survived(given: Array, converted: Array) -> Array:
    """Say of each value whether it is still the same after its conversion."""
    # The sign tells of integers that came round: -1 as UINT8 is 255, and back again -1.
    same: Array = (converted.astype(given.dtype) == given) & ((converted < 0) == (given < 0))
    if given.dtype.kind == "f":
        same |= np.isnan(given) & (np.isnan(converted) if converted.dtype.kind == "f" else False)
    # Where a number is too large for the other type the way back is undefined, and may by chance be right.
    if given.dtype.kind in "iu" and converted.dtype.kind == "f":
        same &= _inside(converted, given.dtype)
    elif given.dtype.kind == "f" and converted.dtype.kind in "iu":
        same &= _inside(given, converted.dtype)
    return same


def _inside(fractions: Array, integers: np.dtype[Any]) -> Array:
    """Say of each number whether it is below what integers of a type end at. What is below all of them shows itself."""
    inside: Array = np.isfinite(fractions) & (fractions < 2.0 ** np.iinfo(integers).max.bit_length())
    return inside


def _shortened(array: Array) -> Array:
    """Return FP32 as the words of BF16, rounded to the nearest and half-way to even; not a number stays that."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    words: Array = np.where(np.isnan(array), quiet, rounded).reshape(array.shape)
    return words


def to_json(value: Any) -> Any:
    """Return ``value`` as plain lists, numbers and texts, for a request that is JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(element) for element in value]
    return value.decode() if isinstance(value, bytes) else value


# Inference requests and responses in bytes: JSON that says what there is, then the tensors as they are.

HEADER_LENGTH = "Inference-Header-Content-Length"


def encode(
    model: ModelDescription, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[list[Buffer], int]:
    """Return the parts of a body, and the length of the JSON at its beginning.

    Raises ``ClientError`` for a value that is not what the model wants.
    """
    entries: list[dict[str, Any]] = []
    parts: list[Buffer] = []
    for name, datatype, array in _tensors(model, inputs):
        raw = encode_bytes(array) if datatype is dtypes.BYTES else buffer_of(array, datatype)
        size = {"binary_data_size": len(raw)}
        entries.append({"name": name, "datatype": datatype.name, "shape": list(array.shape), "parameters": size})
        parts.append(raw)
    head: dict[str, Any] = {"inputs": entries}
    if outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    # This one is about the outputs that are not listed.
    head["parameters"] = {"binary_data_output": True, **parameters}
    text = orjson.dumps(head)
    return [text, *parts], len(text)


def as_line(
    model: ModelDescription, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]
) -> str:
    """Return a request as one line of JSON, with all data in it. Raises as ``encode`` does."""
    document: dict[str, Any] = {
        "inputs": [
            {"name": name, "datatype": datatype.name, "shape": list(array.shape), "data": _to_json(datatype, array)}
            for name, datatype, array in _tensors(model, inputs)
        ]
    }
    if outputs:
        document["outputs"] = [{"name": name} for name in outputs]
    if parameters:
        document["parameters"] = dict(parameters)
    # Not orjson: numbers may be NaN or infinite.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _tensors(model: ModelDescription, inputs: Mapping[str, object]) -> Iterator[tuple[str, DataType, Array]]:
    described = {tensor.name: tensor for tensor in model.inputs}
    for name, value in inputs.items():
        if name not in described:
            known = ", ".join(described) or "none"
            raise ClientError(f"model '{model.name}' has no input '{name}'. Its inputs: {known}")
        yield name, *to_tensor(described[name], value)


def _to_json(datatype: DataType, array: Array) -> list[Any]:
    """Return the elements as JSON has them; bytes that are no text in base64."""
    if datatype is not dtypes.BYTES:
        elements: list[Any] = (widened(array) if datatype is dtypes.BF16 else array).ravel().tolist()
        return elements
    texts: list[Any] = []
    for element in array.flat:
        try:
            texts.append(element if isinstance(element, str) else element.decode())
        except UnicodeDecodeError:
            texts.append({"b64": base64.b64encode(element).decode()})
    return texts


def decode(answer: HttpAnswer) -> dict[str, Array]:
    """Return the outputs of a response by name, as views on its body. Raises ``ClientError`` for what is none."""
    length = int(answer.headers.get(HEADER_LENGTH, len(answer.body)))
    body = memoryview(answer.body)
    try:
        entries = orjson.loads(body[:length])["outputs"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ClientError(f"the server's answer is no inference response: {error}", answer.status) from error
    found = {}
    for entry in entries:
        datatype, shape = dtypes.BY_NAME[entry["datatype"]], tuple(entry["shape"])
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[entry["name"]] = _from_json(datatype, entry["data"]).reshape(shape)
            continue
        array = to_array(TensorSpec(entry["name"], datatype, shape), body[length : length + size])
        found[entry["name"]] = widened(array) if datatype is dtypes.BF16 else array
        length += size
    return found


def _from_json(datatype: DataType, data: list[Any]) -> Array:
    """Return numbers and texts that came as JSON, which is how classifications come from some servers."""
    if datatype is dtypes.BYTES:
        return np.array([element.encode() for element in data], object)
    return np.array(data, np.float32 if datatype is dtypes.BF16 else datatype.numpy)


# Random data for an input: to see whether a model runs at all, and how long that takes.

_WORDS = ("amber", "coral", "drift", "foam", "kelp", "pearl", "reef", "shell", "tide", "wave")


def random_value(tensor: TensorDescription, shape: tuple[int, ...] = ()) -> Array:
    """Return random data of a ``shape``, or of the smallest that the input may have."""
    shape = shape or smallest(tensor)
    generator = np.random.default_rng()
    datatype = dtypes.BY_NAME[tensor.datatype]
    if datatype is dtypes.BYTES:
        return generator.choice(np.array(_WORDS, object), shape)
    if datatype is dtypes.BF16:
        # Multiples of 1/128 below 1 are exact in it.
        return (generator.integers(0, 128, shape) / 128).astype(np.float32)
    if datatype.numpy.kind == "f":
        return generator.random(shape).astype(datatype.numpy)
    return generator.integers(0, 2 if datatype is dtypes.BOOL else 100, shape).astype(datatype.numpy)


def smallest(tensor: TensorDescription) -> tuple[int, ...]:
    """Return the shape of an input, with 1 for sizes that are free."""
    return tuple(1 if size == -1 else size for size in tensor.shape)
