"""Converts values of callers to tensors without loss, and encodes inference requests and decodes responses.

A list has no precision of its own, so its fractions are rounded to the model's type. An array has one, and is converted
only if every value is preserved; callers who want rounding use ``astype``.
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
from nerite.core.sample_inputs import random_values
from nerite.core.tensor import Array, Buffer, DataType, TensorSpec, buffer_of, encode_bytes, to_array


def to_tensor(described: TensorDescription, value: object) -> tuple[DataType, Array]:
    """Convert ``value`` to the type and shape of ``described``: BYTES as objects, BF16 as 16-bit words.

    Missing dimensions of size 1 are added, at the front if possible, so that a single element becomes a batch. Raises
    ``ClientError``.
    """
    datatype = dtypes.BY_NAME.get(described.datatype)
    if datatype is None:
        raise ClientError(f"input {described}: unknown data type {described.datatype}")
    array = _texts(described, value) if datatype is dtypes.BYTES else _numbers(described, datatype, value)
    shape = fit(array.shape, described.shape)
    if shape is None:
        raise ClientError(f"input {described}: a value of shape {list(array.shape)} does not fit")
    return datatype, array.reshape(shape)


def fit(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return ``shape`` with ones added so that it matches ``wanted``; None if that is impossible."""
    missing = len(wanted) - len(shape)
    for leading in range(missing, -1, -1):
        candidate = (1,) * leading + tuple(shape) + (1,) * (missing - leading)
        if all(size in (-1, given) for size, given in zip(wanted, candidate, strict=True)):
            return candidate
    return None


def value_type(tensor: TensorDescription) -> np.dtype[Any]:
    """Return the numpy type of the values of a tensor: float32 for BF16, which numpy does not have."""
    return _value_type(dtypes.BY_NAME[tensor.datatype])


def _value_type(datatype: DataType) -> np.dtype[Any]:
    return np.dtype(np.float32) if datatype is dtypes.BF16 else datatype.numpy


def widened(words: Array) -> Array:
    """Convert the 16-bit words of BF16 to FP32, without loss."""
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
        raise ClientError(f"input {described}: the rows of the value differ in length") from None
    if datatype is dtypes.BF16 and given.dtype.name == "bfloat16":
        return given.view(np.uint16)
    if given.dtype.kind not in "biuf":
        wrong = next((element for element in given.astype(object).flat if not isinstance(element, int | float)), value)
        raise ClientError(f"input {described}: {wrong!r} is not a number of that type")
    wanted = _value_type(datatype)
    with np.errstate(all="ignore"):
        converted = given.astype(wanted)
        if datatype is dtypes.BF16:
            converted = widened(_shortened(converted))
        lossless = _is_preserved(given, converted)
    precise = isinstance(value, np.ndarray | np.generic)
    if not precise and given.dtype.kind == converted.dtype.kind == "f":
        lossless |= np.isfinite(converted)
    if not lossless.all():
        first = given.flat[int(np.argmin(lossless))]
        remedy = f" To have it rounded, pass array.astype(numpy.{wanted.name})." if precise else ""
        raise ClientError(f"input {described}: {first!s} cannot be converted without loss.{remedy}")
    return _shortened(converted) if datatype is dtypes.BF16 else converted


def _is_preserved(given: Array, converted: Array) -> Array:
    """Return for each value whether the conversion preserved it."""
    # Comparing signs detects integers that wrapped around: -1 as UINT8 is 255, and converted back it is -1 again.
    same: Array = (converted.astype(given.dtype) == given) & ((converted < 0) == (given < 0))
    if given.dtype.kind == "f":
        same |= np.isnan(given) & (np.isnan(converted) if converted.dtype.kind == "f" else False)
    # If a number is too large for the other type, converting back is undefined and may be right by chance.
    if given.dtype.kind in "iu" and converted.dtype.kind == "f":
        same &= _is_below_maximum(converted, given.dtype)
    elif given.dtype.kind == "f" and converted.dtype.kind in "iu":
        same &= _is_below_maximum(given, converted.dtype)
    return same


def _is_below_maximum(fractions: Array, integers: np.dtype[Any]) -> Array:
    """Return for each number whether it is finite and below the end of an integer type's range."""
    inside: Array = np.isfinite(fractions) & (fractions < 2.0 ** np.iinfo(integers).max.bit_length())
    return inside


def _shortened(array: Array) -> Array:
    """Convert FP32 to the words of BF16, rounding to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    words: Array = np.where(np.isnan(array), quiet, rounded).reshape(array.shape)
    return words


def to_json(value: Any) -> Any:
    """Convert ``value`` to plain lists, numbers and strings for a JSON request."""
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(element) for element in value]
    return value.decode() if isinstance(value, bytes) else value


# Inference requests and responses with binary data: a JSON header followed by the tensor bytes.

HEADER_LENGTH = "Inference-Header-Content-Length"


def encode(
    model: ModelDescription, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[list[Buffer], int]:
    """Return the parts of a body, and the length of the JSON at its beginning.

    Raises ``ClientError`` for a value that does not match the model's inputs.
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
    # This parameter applies to outputs that are not listed.
    head["parameters"] = {"binary_data_output": True, **parameters}
    text = orjson.dumps(head)
    return [text, *parts], len(text)


def as_line(
    model: ModelDescription, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]
) -> str:
    """Return a request as one line of JSON that includes all data. Raises as ``encode`` does."""
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
    """Return the elements as JSON values; bytes that are not UTF-8 in base64."""
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
    """Return the outputs of a response by name, as views on its body. Raises ``ClientError`` if it is invalid."""
    length = int(answer.headers.get(HEADER_LENGTH, len(answer.body)))
    body = memoryview(answer.body)
    try:
        entries = orjson.loads(body[:length])["outputs"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ClientError(f"the server's answer is not an inference response: {error}", answer.status) from error
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
    """Convert numbers and strings from JSON, the form in which some servers send classifications."""
    if datatype is dtypes.BYTES:
        return np.array([element.encode() for element in data], object)
    return np.array(data, _value_type(datatype))


# Random data for inputs, to test whether a model runs and how long it takes.


def random_value(tensor: TensorDescription, shape: tuple[int, ...] = ()) -> Array:
    """Return random data of a ``shape``, or of the smallest shape that the input may have."""
    return random_values(tensor.name, dtypes.BY_NAME[tensor.datatype], shape or smallest(tensor))


def smallest(tensor: TensorDescription) -> tuple[int, ...]:
    """Return the shape of an input, with 1 for variable sizes."""
    return tuple(1 if size == -1 else size for size in tensor.shape)
