"""Tensors in JSON: lists of numbers or strings to wire form, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from nerite.core import dtype as dtypes
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.tensor import Buffer, TensorSpec, decode_bytes, join_bytes

_INTEGERS = frozenset(
    (
        dtypes.UINT8,
        dtypes.UINT16,
        dtypes.UINT32,
        dtypes.UINT64,
        dtypes.INT8,
        dtypes.INT16,
        dtypes.INT32,
        dtypes.INT64,
    )
)


def read(spec: TensorSpec, value: object) -> Buffer:
    """Return the wire form of ``data``, nested or flat. Raises Triton's errors."""
    datatype = spec.datatype
    if value == [] and not spec.elements:
        return b""
    if datatype in (dtypes.FP16, dtypes.BF16):
        raise InvalidArgument(
            f"receiving {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for input {spec.name}"
        )
    if not isinstance(value, list):
        raise Internal("Unable to parse 'data': attempt to access JSON non-array as array")
    elements = _flat(value)
    if datatype is dtypes.BYTES:
        # How many there are is checked with the signature, as for strings that come as bytes.
        _check_kinds(datatype, elements)
        return join_bytes([element.encode("utf-8", "surrogateescape") for element in elements])
    if len(elements) > spec.elements:
        raise Internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    _check_kinds(datatype, elements)
    if len(elements) < spec.elements:
        raise Internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if datatype in _INTEGERS:
        # Numbers that do not fit wrap around, as they do in C.
        wide = np.array(elements, dtype=np.uint64 if datatype.name.startswith("U") else np.int64)
        array = wide.astype(datatype.numpy)
    else:
        floats = np.array(elements, dtype=np.bool_ if datatype is dtypes.BOOL else np.float64)
        with np.errstate(over="ignore"):  # what is too large for the type is infinite
            array = floats.astype(datatype.numpy)
    return array.data.cast("B") if array.size else b""


def _flat(value: list[Any]) -> list[Any]:
    """Return the elements of a nested list in row-major order."""
    while any(type(item) is list for item in value):
        deeper: list[Any] = []
        for item in value:
            if isinstance(item, list):
                deeper += item
            else:
                deeper.append(item)
        value = deeper
    return value


def _check_kinds(datatype: dtypes.DataType, elements: list[Any]) -> None:
    if datatype is dtypes.BYTES:
        if not all(type(element) is str for element in elements):
            raise Internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    elif datatype is dtypes.BOOL:
        if not all(type(element) is bool for element in elements):
            raise Internal("Unable to parse 'data': attempt to access JSON non-boolean as boolean")
    elif datatype in _INTEGERS:
        unsigned = datatype.name.startswith("U")
        for element in elements:
            low, high = (0, 2**64) if unsigned else (-(2**63), 2**63)
            if type(element) is not int or not low <= element < high:
                kind = "unsigned-integer" if unsigned else "signed-integer"
                raise Internal(f"Unable to parse 'data': attempt to access JSON non-{kind} as {kind}")
    elif not all(type(element) in (int, float) for element in elements):
        raise Internal("Unable to parse 'data': attempt to access JSON non-number as double")


def write(spec: TensorSpec, data: Buffer) -> bytes:
    """Return the JSON array of a tensor: flat, row-major. Raises Triton's errors."""
    datatype = spec.datatype
    if datatype in (dtypes.FP16, dtypes.BF16):
        raise InvalidArgument(
            f"sending {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for output {spec.name}"
        )
    if datatype is dtypes.BYTES:
        return _strings(decode_bytes(data, spec.elements).tolist())
    array = np.frombuffer(data, datatype.numpy)
    if datatype is dtypes.FP32:
        array = array.astype(np.float64)  # Triton prints the double that a float is
    if datatype in (dtypes.FP32, dtypes.FP64) and not np.isfinite(array).all():
        return b"[" + b",".join(map(_number, array.tolist())) + b"]"
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def _strings(elements: list[bytes]) -> bytes:
    """Print strings; bytes that are not UTF-8 stand for themselves, as in Triton, though JSON does not allow them."""
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError:
        texts = [element.decode("utf-8", "surrogateescape") for element in elements]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _number(value: float) -> bytes:
    """Print one number the way Triton does, which writes the three that JSON lacks as bare words."""
    if value != value:
        return b"NaN"
    if value in (float("inf"), float("-inf")):
        return b"Infinity" if value > 0 else b"-Infinity"
    return orjson.dumps(value)
