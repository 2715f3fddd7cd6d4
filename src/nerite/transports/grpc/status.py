"""gRPC's framing of replies: header blocks, trailers, the five bytes before a message, statuses."""

from __future__ import annotations

import re
from functools import lru_cache
from sys import getsizeof
from typing import Final
from urllib.parse import quote

import hpack

from nerite.core.byte_budget import ACCESS_LOG, REFUSALS, Memo
from nerite.core.errors import NeriteError
from nerite.http2 import encode_headers

OK: Final = 0
CANCELLED: Final = 1
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

_BEGINNING: Final = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]
NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By number."""
HEAD: Final = encode_headers(_BEGINNING)
TRAILERS_OK: Final = encode_headers([(b"grpc-status", b"0")])
NOT_GRPC: Final = encode_headers([(b":status", b"415")])
_OUTER_BLANKS: Final = re.compile("^ +| +$")
_MAX_MESSAGE: Final = 4096
"""Bytes of an error text, before it is encoded: a client limits the headers it takes."""


@lru_cache
def head_with_encoding(encoding: str) -> bytes:
    """Return the headers of a reply whose message is compressed."""
    return encode_headers([*_BEGINNING, (b"grpc-encoding", encoding.encode())])


def trailers(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the trailers of a reply that ends with an error after its headers were sent.

    ``retry_after``: seconds after which the client may try again; 0 says nothing about that.
    """
    return encode_headers(_status_fields(status, message, retry_after))


_refusals: Final[Memo[tuple[int, str, int], bytes]] = Memo()
_statuses: Final[Memo[bytes, str]] = Memo()
"""By the last headers of a reply."""


def trailers_only(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the whole reply to a call that failed.

    Remembered, as a server of which too much is asked says the same again and again: refusing must be cheap.
    """
    key = (status, message, retry_after)
    known = _refusals.get(key)
    if known is None:
        known = encode_headers([*_BEGINNING[:2], *_status_fields(status, message, retry_after)])
        REFUSALS.put(_refusals, key, known, 256 + getsizeof(message) + len(known))
    return known


def of_error(error: NeriteError) -> bytes:
    """Return the whole reply that a refusal is."""
    return trailers_only(error.grpc_status, error.message, error.retry_after)


def _status_fields(status: int, message: str, retry_after: int) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status)]
    if retry_after:
        # What a client's retry policy obeys, where it has one.
        fields.append((b"grpc-retry-pushback-ms", b"%d" % (retry_after * 1000)))
    if message:
        # Percent-encoded UTF-8; printable ASCII but the percent sign stands for itself, but for blanks at the ends,
        # which a field's value cannot have.
        raw = message.encode(errors="replace")[:_MAX_MESSAGE]
        text = quote(raw, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
        fields.append((b"grpc-message", _OUTER_BLANKS.sub(lambda found: "%20" * len(found[0]), text).encode()))
    return fields


def framed(message: bytes, compressed: bool = False) -> bytes:
    """Return a message with its length in front."""
    return bytes((compressed,)) + len(message).to_bytes(4) + message


def told(block: bytes) -> str:
    """Return the status that a reply's last headers have: its name, or that of HTTP where the call was none of gRPC."""
    known = _statuses.get(block)
    if known is None:
        fields = dict(hpack.Decoder().decode(block, raw=True))
        code = fields.get(b"grpc-status")
        known = NAMES[int(code)] if code is not None else fields[b":status"].decode()
        ACCESS_LOG.put(_statuses, block, known, 128 + len(block))
    return known


_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_seconds(value: bytes) -> float | None:
    """Return what a ``grpc-timeout`` means, None if it means nothing."""
    text = value.decode("latin-1")
    digits, unit = text[:-1], text[-1:]
    if not digits.isdecimal() or len(digits) > 8 or unit not in _UNITS:
        return None
    return int(digits) * _UNITS[unit]


UNREAD_TEXT: Final = "the answer was dropped: the client leaves as much unread as the server keeps for a connection"
UNREAD: Final = trailers_only(RESOURCE_EXHAUSTED, UNREAD_TEXT)


def stalled_text(seconds: float) -> str:
    """Return what is said of a message that does not come on."""
    return f"the message did not come on for {seconds:g} s. Use --grpc-upload-timeout to wait longer."


def stalled(seconds: float) -> bytes:
    """Return the whole reply to a call whose message does not come on."""
    return trailers_only(DEADLINE_EXCEEDED, stalled_text(seconds))
