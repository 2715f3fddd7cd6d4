"""Tensors in JSON: lists of numbers or strings to wire form, and back."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.signature import SignatureInput, shape_text
from nerite.core.tensor import Array, Buffer, DataType, TensorSpec, WrongElementCount, join_bytes, split_bytes
from nerite.transports.http.json_text import MAX_DEPTH, TooDeep

# Tensors of strings in JSON: an element is a string, or ``{"b64": "…"}`` where its bytes need not be text.

_KEY = "b64"
_text = itemgetter(_KEY)
_base64 = partial(a2b_base64, strict_mode=True)


def read_strings(spec: TensorSpec, elements: list[Any], kinds: set[type]) -> bytes:
    """Return the wire form of ``elements``, which are of these types. Raises Triton's errors, and ours for base64.

    How many there are is checked with the signature, as for strings that come as bytes: of too many, one is enough.
    """
    if len(elements) > spec.elements and kinds <= {str, dict}:
        elements = elements[: spec.elements + 1]
    if kinds <= {str}:
        joined = join_bytes([element.encode("utf-8", "surrogateescape") for element in elements])
    else:
        joined = join_bytes(_decoded(elements) or [_element(spec, index, each) for index, each in enumerate(elements)])
    if len(elements) == spec.elements:
        return joined
    miscounted = WrongElementCount(joined)
    miscounted.elements = len(elements)
    return miscounted


def _decoded(elements: list[Any]) -> list[bytes]:
    """Return what elements stand for that are all in base64; none if that is not so."""
    try:
        if set(map(len, elements)) != {1}:
            return []
        return [*map(_base64, map(_text, elements))]
    except (KeyError, TypeError, ValueError):
        return []


def _element(spec: TensorSpec, index: int, element: Any) -> bytes:
    if type(element) is str:
        return element.encode("utf-8", "surrogateescape")
    if type(element) is not dict:
        raise Internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    text = element.get(_KEY)
    if type(text) is not str or len(element) != 1:
        raise Internal(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
            f"(element {index} of input '{spec.name}' is an object, and the only one that stands for bytes is "
            f'{{"{_KEY}": "…"}})'
        )
    try:
        return _base64(text)
    except ValueError as error:
        raise InvalidArgument(
            f"element {index} of input '{spec.name}' is not valid base64: {error}. What is taken is the standard "
            "alphabet (A-Z a-z 0-9 + /), padded with '=', without line breaks"
        ) from None


def write_strings(spec: TensorSpec, data: Buffer) -> bytes:
    """Return the JSON array of a tensor, its elements as strings.

    Bytes that are not UTF-8 stand for themselves, as in Triton, though JSON does not allow them.
    """
    elements = split_bytes(data, spec.elements)
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError:
        texts = [element.decode("utf-8", "surrogateescape") for element in elements]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def write_base64(spec: TensorSpec, data: Buffer) -> bytes:
    """Return the JSON array of a tensor, its elements in the form that ``read`` takes for any bytes."""
    elements = split_bytes(data, spec.elements)
    return b"[" + b",".join(b'{"b64":"%b"}' % b2a_base64(element, newline=False) for element in elements) + b"]"


# Numbers of two bytes, FP16 and BF16, from JSON numbers and back.
#
# Triton refuses them in JSON. What is too large becomes infinite, as it does with FP32 here, in numpy and in torch.

_Doubles = NDArray[np.float64]
_Words = NDArray[np.uint16]
_SIGN = 0x8000


def read_half(datatype: DataType, numbers: _Doubles) -> _Words:
    """Return ``numbers`` as words, each rounded once, to the nearest; of two as near, to the even one."""
    return _FORMATS[datatype].words(numbers)


def write_half(datatype: DataType, data: Buffer) -> bytes:
    """Return a JSON array, each number with as few digits as are read as the same; NaN and Infinity are bare words."""
    words: list[int] = np.frombuffer(data, "<u2").tolist()
    return b"[" + b",".join(map(_FORMATS[datatype].__getitem__, words)) + b"]"


class _Format(dict[int, bytes]):
    """One of the two types: how doubles become words of 16 bits, and the text of each word that was ever written."""

    def __init__(self, words: Callable[[_Doubles], _Words], doubles: Callable[[_Words], _Doubles]) -> None:
        super().__init__()
        self.words = words
        self._doubles = doubles

    @cached_property
    def _values(self) -> list[float]:
        """All numbers without a sign: ascending, then Infinity, then the NaNs."""
        values: list[float] = self._doubles(np.arange(_SIGN, dtype="<u2")).tolist()
        return values

    def __missing__(self, word: int) -> bytes:
        if word & _SIGN:
            positive = self[word ^ _SIGN]
            text = positive if positive == b"NaN" else b"-" + positive
        else:
            text = self._text(word)
        self[word] = text
        return text

    def _text(self, word: int) -> bytes:
        value = self._values[word]
        if value != value:
            return b"NaN"
        if value == float("inf"):
            return b"Infinity"
        if word == 0:
            return b"0.0"
        # What is read as this number lies between the middles to its neighbours, or on them if it is even.
        below = (self._values[word - 1] + value) / 2
        above = (value + self._values[word + 1]) / 2
        if above == float("inf"):
            above = value + (value - below)
        digits = 0
        while True:
            shorter = float(f"{value:.{digits}e}")
            if below < shorter < above or (word % 2 == 0 and shorter in (below, above)):
                return orjson.dumps(shorter)
            digits += 1


def _half_words(numbers: _Doubles) -> _Words:
    with np.errstate(over="ignore", under="ignore"):
        return numbers.astype("<f2").view("<u2")


def _half_doubles(words: _Words) -> _Doubles:
    return words.view("<f2").astype(np.float64)


def _brain_words(numbers: _Doubles) -> _Words:
    """Return the upper half of the FP32 numbers, rounded.

    On the way from 64 bits there, what is cut off is left as a last bit that is set, so that nothing is rounded twice.
    """
    with np.errstate(over="ignore", under="ignore"):
        singles = numbers.astype(np.float32)
    exact = singles.astype(np.float64)
    bits = singles.view(np.uint32)
    bits -= np.abs(exact) > np.abs(numbers)
    bits |= exact != numbers
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    words = (rounded >> np.uint32(16)).astype("<u2")
    words[np.isnan(numbers)] = 0x7FC0
    return words


def _brain_doubles(words: _Words) -> _Doubles:
    with np.errstate(invalid="ignore"):  # some NaNs signal, and are NaNs all the same
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


_FORMATS = {
    dtypes.FP16: _Format(_half_words, _half_doubles),
    dtypes.BF16: _Format(_brain_words, _brain_doubles),
}

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


def shape_of(declared: SignatureInput, batched: bool, count: int) -> tuple[int, ...]:
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


def read_tensor(spec: TensorSpec, value: object, half: bool = False) -> Buffer:
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
        return read_strings(spec, elements, kinds)
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
            array = read_half(datatype, doubles) if datatype in HALVES else doubles.astype(datatype.numpy)
    return array.data.cast("B") if array.size else b""


def _miscounted(spec: TensorSpec, elements: list[Any]) -> NeriteError:
    return Internal(
        "Unable to parse 'data': Shape does not match true shape of 'data' field "
        f"(input '{spec.name}' has {len(elements)} values, and its shape {shape_text(spec.shape)} needs "
        f"{spec.elements})"
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


def write_tensor(spec: TensorSpec, data: Buffer, half: bool = False, base64: bool = False) -> bytes:
    """Return the JSON array of a tensor: flat, row-major. Raises Triton's errors.

    ``half``: FP16 and BF16 are given. ``base64``: elements of BYTES are in base64.
    """
    datatype = spec.datatype
    if datatype in HALVES:
        if half:
            return write_half(datatype, data)
        raise InvalidArgument(
            f"sending {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for output {spec.name} {_REMEDY}"
        )
    if datatype is dtypes.BYTES:
        return (write_base64 if base64 else write_strings)(spec, data)
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
