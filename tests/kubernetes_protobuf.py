"""Decodes what helm and kubectl send as protobuf although JSON would do: secrets and namespaces."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
_TEXTS = {1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion"}
_MAPS = {11: "labels", 12: "annotations"}


def decode(body: bytes) -> dict[str, Any]:
    """Return the object in a body that begins with ``MAGIC``: an envelope with its kind, and the object itself."""
    assert body.startswith(MAGIC)
    envelope = dict(_fields(body[len(MAGIC) :]))
    kind = {number: value.decode() for number, value in _fields(envelope[1])}
    found: dict[str, Any] = {"apiVersion": kind[1], "kind": kind[2], "metadata": {}}
    for number, value in _fields(envelope[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif kind[2] == "Secret" and number == 2:
            key, data = _entry(value)
            found.setdefault("data", {})[key.decode()] = base64.b64encode(data).decode()
        elif kind[2] == "Secret" and number == 3:
            found["type"] = value.decode()
    assert kind[2] in ("Secret", "Namespace", "DeleteOptions"), kind
    return found


def _metadata(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if number in _TEXTS:
            found[_TEXTS[number]] = value.decode()
        elif number in _MAPS:
            key, text = _entry(value)
            found.setdefault(_MAPS[number], {})[key.decode()] = text.decode()
    return {key: value for key, value in found.items() if value}


def _entry(data: bytes) -> tuple[bytes, bytes]:
    pair = dict(_fields(data))
    return pair.get(1, b""), pair.get(2, b"")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a message that have a length; numbers are passed over."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        length, at = _number(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            assert tag & 7 == 0, tag


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
