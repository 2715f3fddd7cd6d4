"""Inference requests and responses in bytes: JSON that says what there is, then the tensors as they are."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from nerite.client.connection import Answer
from nerite.client.conversion import to_tensor, widened
from nerite.client.description import Model
from nerite.client.error import ClientError
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.tensor import Array, Buffer, TensorSpec, buffer_of, encode_bytes, to_array

HEADER_LENGTH = "Inference-Header-Content-Length"


def encode(
    model: Model, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]
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


def as_line(model: Model, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, Any]) -> str:
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


def _tensors(model: Model, inputs: Mapping[str, object]) -> Iterator[tuple[str, DataType, Array]]:
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


def decode(answer: Answer) -> dict[str, Array]:
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
