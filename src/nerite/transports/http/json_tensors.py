"""Tensors in JSON: lists of numbers or strings to wire form, and back."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

import numpy as np
import orjson

from nerite.core import dtype as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.signature import Input, show
from nerite.core.tensor import Array, Buffer, TensorSpec
from nerite.transports.http import half_precision, json_strings
from nerite.transports.http.json_error import MAX_DEPTH, TooDeep

HALVES = (dtypes.FP16, dtypes.BF16)
"""Types that JSON has nothing for, as far as Triton is concerned."""
_EMPTY_TEXT = 4
"""Bytes of an element of BYTES that is empty: its length."""
_DEEPEST = MAX_DEPTH - 1
"""Lists that an element may be in, the data itself among them. Triton counts the element, too."""
_REMEDY = "or start the server with --http-json-half-precision=true"
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


def shape_of(declared: Input, batched: bool, count: int) -> tuple[int, ...]:
    """Return the shape that ``count`` elements have: what is left over goes to the innermost free dimension.

    ``batched``: there is a dimension in front of the declared ones. Raises Triton's error.
    """
    dims = [-1, *declared.dims] if batched else [*declared.dims]
    fixed = prod(dim for dim in dims if dim >= 0)
    free = [index for index, dim in enumerate(dims) if dim < 0]
    fits = fixed and count % fixed == 0 and (free or count == fixed)
    if not fits:
        raise InvalidArgument(f"The schema can not convert input '{declared.name}' to tensor with proper shape")
    for index in free:
        dims[index] = 1
    if free:
        dims[free[-1]] = count // fixed
    return tuple(dims)


def read(spec: TensorSpec, value: object, half: bool = False) -> Buffer:
    """Return the wire form of ``data``, nested or flat. Raises Triton's errors.

    ``half``: FP16 and BF16 are taken.
    """
    datatype = spec.datatype
    if not spec.shape:  # as in Triton nothing is read: no model takes a tensor without dimensions
        return bytes(datatype.size or _EMPTY_TEXT)
    if not spec.elements:  # nor here
        return b""
    if datatype in HALVES and not half:
        raise InvalidArgument(
            f"receiving {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for input {spec.name} {_REMEDY}"
        )
    if not isinstance(value, list):
        raise Internal("Unable to parse 'data': attempt to access JSON non-array as array")
    elements, kinds = _flat(value)
    if datatype is dtypes.BYTES:
        return json_strings.read(spec, elements, kinds)
    if len(elements) > spec.elements:
        raise _miscounted(spec, elements)
    _check_kinds(datatype, elements, kinds)
    if len(elements) < spec.elements:
        raise _miscounted(spec, elements)
    if datatype is dtypes.BOOL:
        array: Array = np.array(elements, dtype=np.bool_)
    elif datatype in _INTEGERS:
        # Numbers that do not fit wrap around, as they do in C.
        wide = np.array(elements, dtype=np.uint64 if datatype.name.startswith("U") else np.int64)
        array = wide.astype(datatype.numpy)
    else:
        doubles = np.array(elements, dtype=np.float64)
        with np.errstate(over="ignore"):  # what is too large for the type is infinite
            array = half_precision.read(datatype, doubles) if datatype in HALVES else doubles.astype(datatype.numpy)
    return array.data.cast("B") if array.size else b""


def _miscounted(spec: TensorSpec, elements: list[Any]) -> NeriteError:
    return Internal(
        "Unable to parse 'data': Shape does not match true shape of 'data' field "
        f"(input '{spec.name}' has {len(elements)} values, and its shape {show(spec.shape)} needs {spec.elements})"
    )


def flat(value: list[Any]) -> list[Any]:
    """Return the elements of a nested list in row-major order. Raises ``TooDeep``."""
    return _flat(value)[0]


def _flat(value: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the elements, and of which types they are.

    Takes time for each element and each list once, whatever their depth.
    """
    kinds = set(map(type, value))
    depth = 1
    while list in kinds:
        if len(kinds) > 1:
            value = _flat_unevenly(value, depth)
        elif depth == _DEEPEST:
            raise TooDeep
        else:
            depth += 1
            value = list(chain.from_iterable(value))
        kinds = set(map(type, value))
    return value, kinds


def _flat_unevenly(value: list[Any], depth: int) -> list[Any]:
    """Do as ``_flat`` where lists stand beside other elements. ``depth`` is that of ``value``."""
    elements: list[Any] = []
    under_way = [iter(value)]
    while under_way:
        for item in under_way[-1]:
            if type(item) is list:
                if depth + len(under_way) > _DEEPEST:
                    raise TooDeep
                under_way.append(iter(item))
                break
            elements.append(item)
        else:
            under_way.pop()
    return elements


def _check_kinds(datatype: dtypes.DataType, elements: list[Any], kinds: set[type]) -> None:
    # Large tensors come as lists too: all of this runs without a step of Python for each element.
    if datatype is dtypes.BOOL:
        if not kinds <= {bool}:
            raise Internal("Unable to parse 'data': attempt to access JSON non-boolean as boolean")
    elif datatype in _INTEGERS:
        unsigned = datatype.name.startswith("U")
        low, high = (0, 2**64) if unsigned else (-(2**63), 2**63)
        if not kinds <= {int} or (elements and not low <= min(elements) <= max(elements) < high):
            kind = "unsigned-integer" if unsigned else "signed-integer"
            raise Internal(f"Unable to parse 'data': attempt to access JSON non-{kind} as {kind}")
    elif not kinds <= {int, float}:
        raise Internal("Unable to parse 'data': attempt to access JSON non-number as double")


def write(spec: TensorSpec, data: Buffer, half: bool = False, base64: bool = False) -> bytes:
    """Return the JSON array of a tensor: flat, row-major. Raises Triton's errors.

    ``half``: FP16 and BF16 are given. ``base64``: elements of BYTES are in base64.
    """
    datatype = spec.datatype
    if datatype in HALVES:
        if half:
            return half_precision.write(datatype, data)
        raise InvalidArgument(
            f"sending {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for output {spec.name} {_REMEDY}"
        )
    if datatype is dtypes.BYTES:
        return (json_strings.write_base64 if base64 else json_strings.write)(spec, data)
    array = np.frombuffer(data, datatype.numpy)
    if datatype is dtypes.FP32:
        array = array.astype(np.float64)  # Triton prints the double that a float is
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return _with_words(text, array) if datatype in (dtypes.FP32, dtypes.FP64) and b"n" in text else text


def _with_words(text: bytes, array: Array) -> bytes:
    """Write the three numbers that JSON lacks as bare words, as Triton does, where ``text`` has null."""
    others = array[~np.isfinite(array)]
    if np.isnan(others).all():
        return text.replace(b"null", b"NaN")
    words = np.where(np.isnan(others), b"NaN", np.where(others > 0, b"Infinity", b"-Infinity")).tolist()
    between = text.split(b"null")
    return b"".join(chain.from_iterable(zip(between, [*words, b""], strict=True)))
