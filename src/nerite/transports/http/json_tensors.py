"""Converts tensors between JSON lists of numbers or strings and their wire form."""

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
from nerite.core.client_text import MAX_DEPTH
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.signature import SignatureInput, shape_text
from nerite.core.tensor import Array, Buffer, DataType, TensorSpec, WrongElementCount, join_bytes, split_bytes
from nerite.transports.http.json_text import TooDeep

# BYTES tensors in JSON: an element is a string, or ``{"b64": "…"}`` for arbitrary bytes.

_KEY = "b64"
_text = itemgetter(_KEY)
_base64 = partial(a2b_base64, strict_mode=True)


def read_strings(spec: TensorSpec, elements: list[Any], kinds: set[type]) -> bytes:
    """Return the wire form of ``elements``, whose types are ``kinds``. Raises Triton's errors, and ours for base64.

    A wrong number of elements is reported later, with the signature, as for binary strings; so of too many elements
    only one extra is kept.
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
    """Return the decoded elements if all of them are valid base64 objects, else an empty list."""
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
            f"element {index} of input '{spec.name}' is not valid base64: {error}. Use the standard "
            "alphabet (A-Z a-z 0-9 + /), padded with '=', without line breaks"
        ) from None


def write_strings(spec: TensorSpec, data: Buffer) -> bytes:
    """Return a tensor as a JSON array of strings.

    Bytes that are not UTF-8 are written unchanged, as in Triton, although JSON does not allow them.
    """
    elements = split_bytes(data, spec.elements)
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError:
        texts = [element.decode("utf-8", "surrogateescape") for element in elements]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def write_base64(spec: TensorSpec, data: Buffer) -> bytes:
    """Return a tensor as a JSON array of base64 objects, which ``read_strings`` accepts."""
    elements = split_bytes(data, spec.elements)
    return b"[" + b",".join(b'{"b64":"%b"}' % b2a_base64(element, newline=False) for element in elements) + b"]"


# FP16 and BF16 as JSON numbers, which Triton does not support.
#
# Values that are too large become infinite, as they do with FP32 here, in numpy and in torch.

_Doubles = NDArray[np.float64]
_Words = NDArray[np.uint16]
_SIGN = 0x8000


def read_half(datatype: DataType, numbers: _Doubles) -> _Words:
    """Return ``numbers`` as 16-bit words, each rounded once, to nearest with ties to even."""
    return _HALF_FORMATS[datatype].words(numbers)


def write_half(datatype: DataType, data: Buffer) -> bytes:
    """Return a JSON array of the shortest decimals that read back unchanged; NaN and Infinity are bare words."""
    words: list[int] = np.frombuffer(data, "<u2").tolist()
    return b"[" + b",".join(map(_HALF_FORMATS[datatype].__getitem__, words)) + b"]"


class _HalfFormat(dict[int, bytes]):
    """Conversions of one 16-bit type, and a memo of the JSON text of each word written so far."""

    def __init__(self, words: Callable[[_Doubles], _Words], doubles: Callable[[_Words], _Doubles]) -> None:
        super().__init__()
        self.words = words
        self._doubles = doubles

    @cached_property
    def _values(self) -> list[float]:
        """All values with a clear sign bit: the numbers in ascending order, then Infinity, then the NaNs."""
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
        # Decimals that round to this value lie between the midpoints to its neighbours, or on them if it is even.
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
    """Return the upper halves of the FP32 numbers, rounded.

    The conversion from 64 to 32 bits rounds to odd (a sticky last bit), which avoids double rounding.
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
    with np.errstate(invalid="ignore"):  # signalling NaNs are converted like any other NaN
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


_HALF_FORMATS = {
    dtypes.FP16: _HalfFormat(_half_words, _half_doubles),
    dtypes.BF16: _HalfFormat(_brain_words, _brain_doubles),
}

HALVES = (dtypes.FP16, dtypes.BF16)
"""Types that Triton does not support in JSON."""
_EMPTY_STRING_SIZE = 4
"""Size of an empty BYTES element: only its length field."""
_MAX_NESTING = MAX_DEPTH - 1
"""Maximum nesting of lists, including the outermost. Triton's limit also counts the element."""
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
    """Return a shape for ``count`` elements: the innermost free dimension takes them all, other free ones are 1.

    ``batched``: a batch dimension precedes the declared ones. Raises Triton's error if the elements do not fit.
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
    """Return the wire form of a nested or flat list. Raises Triton's errors.

    ``half``: FP16 and BF16 are allowed.
    """
    datatype = spec.datatype
    if not spec.shape:  # the data is not read, as in Triton: no model takes a tensor without dimensions
        return bytes(datatype.size or _EMPTY_STRING_SIZE)
    if not spec.elements:  # the data is not read here either
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
        raise _wrong_count(spec, elements)
    _check_kinds(datatype, elements, kinds)
    if len(elements) < spec.elements:
        raise _wrong_count(spec, elements)
    if datatype is dtypes.BOOL:
        array: Array = np.array(elements, dtype=np.bool_)
    elif datatype in _INTEGERS:
        # Numbers that do not fit wrap around, as in C.
        wide = np.array(elements, dtype=np.uint64 if datatype.name.startswith("U") else np.int64)
        array = wide.astype(datatype.numpy)
    else:
        doubles = np.array(elements, dtype=np.float64)
        with np.errstate(over="ignore"):  # values too large for the type become infinite
            array = read_half(datatype, doubles) if datatype in HALVES else doubles.astype(datatype.numpy)
    return array.data.cast("B") if array.size else b""


def _wrong_count(spec: TensorSpec, elements: list[Any]) -> NeriteError:
    return Internal(
        "Unable to parse 'data': Shape does not match true shape of 'data' field "
        f"(input '{spec.name}' has {len(elements)} values, and its shape {shape_text(spec.shape)} needs "
        f"{spec.elements})"
    )


def flat(value: list[Any]) -> list[Any]:
    """Return the elements of a nested list in row-major order. Raises ``TooDeep``."""
    return _flat(value)[0]


def _flat(value: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the elements of a nested list, and the set of their types.

    Runs in time linear in the number of elements and lists, whatever their depth.
    """
    kinds = set(map(type, value))
    depth = 1
    while list in kinds:
        if len(kinds) > 1:
            value = _flat_uneven(value, depth)
        elif depth == _MAX_NESTING:
            raise TooDeep
        else:
            depth += 1
            value = list(chain.from_iterable(value))
        kinds = set(map(type, value))
    return value, kinds


def _flat_uneven(value: list[Any], depth: int) -> list[Any]:
    """Flatten a list of ``depth`` that mixes lists and other elements."""
    elements: list[Any] = []
    under_way = [iter(value)]
    while under_way:
        for item in under_way[-1]:
            if type(item) is list:
                if depth + len(under_way) > _MAX_NESTING:
                    raise TooDeep
                under_way.append(iter(item))
                break
            elements.append(item)
        else:
            under_way.pop()
    return elements


def _check_kinds(datatype: dtypes.DataType, elements: list[Any], kinds: set[type]) -> None:
    # No Python code runs per element, because large tensors arrive as lists, too.
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
    """Return a tensor as a flat JSON array in row-major order. Raises Triton's errors.

    ``half``: FP16 and BF16 are allowed. ``base64``: BYTES elements are written as base64.
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
        array = array.astype(np.float64)  # Triton prints a float converted to double
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return _with_nonfinite(text, array) if datatype in (dtypes.FP32, dtypes.FP64) and b"n" in text else text


def _with_nonfinite(text: bytes, array: Array) -> bytes:
    """Replace each null in ``text`` with NaN, Infinity or -Infinity as a bare word, as Triton writes them."""
    others = array[~np.isfinite(array)]
    if np.isnan(others).all():
        return text.replace(b"null", b"NaN")
    words = np.where(np.isnan(others), b"NaN", np.where(others > 0, b"Infinity", b"-Infinity")).tolist()
    between = text.split(b"null")
    return b"".join(chain.from_iterable(zip(between, [*words, b""], strict=True)))
