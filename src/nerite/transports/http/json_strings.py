"""Tensors of strings in JSON: an element is a string, or ``{"b64": "…"}`` where its bytes need not be text."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from typing import Any

import orjson

from nerite.core.errors import Internal, InvalidArgument
from nerite.core.tensor import Buffer, TensorSpec, decode_bytes, join_bytes

_KEY = "b64"


def read(spec: TensorSpec, elements: list[Any]) -> bytes:
    """Return the wire form of ``elements``. Raises Triton's errors, and our own for base64."""
    # How many there are is checked with the signature, as for strings that come as bytes.
    if set(map(type, elements)) <= {str}:
        return join_bytes([element.encode("utf-8", "surrogateescape") for element in elements])
    return join_bytes([_element(spec, index, element) for index, element in enumerate(elements)])


def _element(spec: TensorSpec, index: int, element: Any) -> bytes:
    if type(element) is str:
        return element.encode("utf-8", "surrogateescape")
    if type(element) is not dict:
        raise Internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    where = f"element {index} of input '{spec.name}'"
    if element.keys() != {_KEY} or type(element[_KEY]) is not str:
        raise Internal(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
            f'({where} is an object, and the only one that stands for bytes is {{"{_KEY}": "…"}})'
        )
    try:
        return a2b_base64(element[_KEY], strict_mode=True)
    except ValueError as error:
        raise InvalidArgument(
            f"{where} is not valid base64: {error}. What is taken is the standard alphabet (A-Z a-z 0-9 + /), padded "
            "with '=', without line breaks"
        ) from None


def write(spec: TensorSpec, data: Buffer) -> bytes:
    """Return the JSON array of a tensor, its elements as strings.

    Bytes that are not UTF-8 stand for themselves, as in Triton, though JSON does not allow them.
    """
    elements: list[bytes] = decode_bytes(data, spec.elements).tolist()
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError:
        texts = [element.decode("utf-8", "surrogateescape") for element in elements]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def write_base64(spec: TensorSpec, data: Buffer) -> bytes:
    """Return the JSON array of a tensor, its elements in the form that ``read`` takes for any bytes."""
    elements: list[bytes] = decode_bytes(data, spec.elements).tolist()
    return b"[" + b",".join(b'{"b64":"%b"}' % b2a_base64(element, newline=False) for element in elements) + b"]"
