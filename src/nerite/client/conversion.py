"""From what a caller has to the tensor that a model wants: data type and shape, and nothing lost on the way.

A list has no precision: its fractions are rounded to the type of the model. An array has one, and is converted only if
every value survives; who wants it rounded says so with ``astype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nerite.client.description import TensorDescription
from nerite.client.error import ClientError
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.tensor import Array


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
