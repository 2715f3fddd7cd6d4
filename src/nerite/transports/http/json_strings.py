"""Tensors of strings in JSON: an element is a string, or ``{"b64": "…"}`` where its bytes need not be text."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from functools import partial
from operator import itemgetter
from typing import Any

import orjson

from nerite.core.errors import Internal, InvalidArgument
from nerite.core.tensor import Buffer, Miscounted, TensorSpec, join_bytes, split_bytes

_KEY = "b64"
_text = itemgetter(_KEY)
_base64 = partial(a2b_base64, strict_mode=True)


def read(spec: TensorSpec, elements: list[Any], kinds: set[type]) -> bytes:
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
    miscounted = Miscounted(joined)
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


def write(spec: TensorSpec, data: Buffer) -> bytes:
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
