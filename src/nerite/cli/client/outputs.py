"""Tensors to look at, and for machines."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nerite.client import Model
from nerite.core.dtype import from_numpy
from nerite.core.tensor import Array
from nerite.observability.table import render

_MOST_ELEMENTS = 32
"""Of an array with more only the beginning and the end are shown."""


def as_table(model: Model, outputs: Mapping[str, Array], width: int) -> str:
    """Return outputs as a table for people, no wider than ``width``."""
    rows = [
        (name, _datatype(model, name, array), str(list(array.shape)), _shown(array)) for name, array in outputs.items()
    ]
    return render(("Output", "Datatype", "Shape", "Values"), rows, width)


def as_json(model: Model, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return outputs as what can be written as JSON; bytes that are no text become ``{"base64": …}``."""
    return {
        name: {
            "datatype": _datatype(model, name, array),
            "shape": list(array.shape),
            "data": (_texts(array, _for_machines) if array.dtype == object else array).tolist(),
        }
        for name, array in outputs.items()
    }


def _datatype(model: Model, name: str, array: Array) -> str:
    # BF16 comes as float32, so that the array alone does not tell.
    described = {tensor.name: tensor.datatype for tensor in model.outputs}
    if name in described and described[name] == "BF16":
        return "BF16"
    datatype = from_numpy(array.dtype)
    return datatype.name if datatype else str(array.dtype)


def _shown(array: Array) -> str:
    if array.dtype == object:
        array = _texts(array, _for_people)
        if array.size == 1:
            return str(array.flat[0])
    return np.array2string(array, threshold=_MOST_ELEMENTS, separator=", ", max_line_width=100)


def _texts(array: Array, text_of: Callable[[bytes], object]) -> Array:
    texts = np.empty(array.size, object)
    texts[:] = [text_of(element) for element in array.flat]
    return texts.reshape(array.shape)


def _for_people(element: bytes) -> str:
    return element.decode(errors="backslashreplace")


def _for_machines(element: bytes) -> object:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(element).decode()}
