"""OTLP's messages as bytes: as much of protobuf as they need.

Written by hand, because every traced request becomes several spans with a dozen events: the messages that protobuf
makes cost three times as much. What changes with each span has fields of fixed size, packed in one go; what repeats is
encoded once. Field numbers are those of ``opentelemetry/proto/trace/v1/trace.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from nerite.wire.fields import nested, varint

SERVER: Final = 2
INTERNAL: Final = 1
"""Kinds of spans."""
_ERROR: Final = 2
_ROOT: Final = struct.Struct("<2s16s2s8scQcQ")
_CHILD: Final = struct.Struct("<2s16s2s8s2s8scQcQ")
_LINK: Final = struct.Struct("<2s2s16s2s8s")


def attribute(field: int, name: str, value: str | int) -> bytes:
    """Return an attribute in the list that has this number."""
    if isinstance(value, str):
        of_kind = nested(1, value.encode(errors="replace"))
    else:
        of_kind = b"\x18" + varint(value & 0xFFFFFFFFFFFFFFFF)
    return nested(field, nested(1, name.encode()) + nested(2, of_kind))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Return attributes; what is neither text nor a whole number is told as text."""
    return b"".join(
        attribute(field, name, value if isinstance(value, (str, int)) else str(value)) for name, value in values.items()
    )


@lru_cache(4096)
def form(name: str, kind: int, *given: tuple[str, str | int]) -> bytes:
    """Return what many spans have in common: name, kind, and these attributes."""
    return nested(5, name.encode(errors="replace")) + b"\x30" + varint(kind) + attributes(9, dict(given))


@lru_cache(256)
def _event(name: str) -> bytes:
    """Return an event up to its time."""
    told = nested(2, name.encode())
    return b"\x5a" + varint(len(told) + 9) + told + b"\x09"


def event(name: str, at: int) -> bytes:
    """Return something that happened during a span."""
    return _event(name) + at.to_bytes(8, "little")


def link(trace_id: int, span_id: int) -> bytes:
    """Return the mention of a span that this one belongs together with."""
    return _LINK.pack(b"\x6a\x1c", b"\x0a\x10", trace_id.to_bytes(16), b"\x12\x08", span_id.to_bytes(8))


def failed(message: str) -> bytes:
    """Return the status of a span that is an error."""
    return nested(15, nested(2, message.encode(errors="replace")) + b"\x18" + varint(_ERROR))


def dropped_events(count: int) -> bytes:
    """Return how many events were left out."""
    return b"\x60" + varint(count) if count else b""


def span(form: bytes, trace_id: int, span_id: int, parent: int, start: int, end: int, *more: bytes) -> bytes:
    """Return a span, as an entry of its list."""
    trace = trace_id.to_bytes(16)
    own = span_id.to_bytes(8)
    if parent:
        ids = _CHILD.pack(
            b"\x0a\x10", trace, b"\x12\x08", own, b"\x22\x08", parent.to_bytes(8), b"\x39", start, b"\x41", end
        )
    else:
        ids = _ROOT.pack(b"\x0a\x10", trace, b"\x12\x08", own, b"\x39", start, b"\x41", end)
    body = b"".join((ids, form, *more))
    return b"\x12%b%b" % (varint(len(body)), body)


def state(text: str) -> bytes:
    """Return the ``tracestate`` of a span."""
    return nested(3, text.encode()) if text else b""


def message(resource: Mapping[str, str], scope: Mapping[str, str], spans: bytes) -> bytes:
    """Return the whole request: ``spans`` one behind the other, and who says so."""
    named = nested(1, nested(1, scope["name"].encode()) + nested(2, scope["version"].encode()))
    return nested(1, nested(1, attributes(1, resource)) + nested(2, named + spans))
