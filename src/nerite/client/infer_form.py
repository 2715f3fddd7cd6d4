"""Inference requests and responses in bytes: JSON that says what there is, then the tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    described = {tensor.name: tensor for tensor in model.inputs}
    entries: list[dict[str, Any]] = []
    parts: list[Buffer] = []
    for name, value in inputs.items():
        if name not in described:
            known = ", ".join(described) or "none"
            raise ClientError(f"model '{model.name}' has no input '{name}'. Its inputs: {known}")
        datatype, array = to_tensor(described[name], value)
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
