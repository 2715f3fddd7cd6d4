"""Request headers: the fields of a block, checked against RFC 9113 section 8, and kept by the block's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from nerite.http2.compression import Field, FieldDecoder, FieldsTooLarge, encode_fields
from nerite.http2.frames import ErrorCode, ProtocolError
from nerite.http2.limits import Limits

_valid_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_valid_value = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?").fullmatch
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_CONNECTION_SPECIFIC: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_LONGEST_BLOCK: Final = 1_024
"""Bytes of a block that is kept."""
_HEADERS: Final = 2_048
_FIELD: Final = 160
"""Bytes that headers with their memo take in memory, and each of their fields beside its text."""

# Valid fields, of all connections: clients send few different ones that are short.
_MOST_FIELDS: Final = 4_096
_LONGEST_FIELD: Final = 128
_checked: Final[set[Field]] = set()


class Malformed(Exception):
    """The request breaks a rule about headers: its stream is reset, the connection goes on."""

    def __init__(self, reason: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


class Headers:
    """The headers of a request. Never changed; the same object for each request with the same block.

    ``fields`` are the regular ones in their order. ``memo`` is for whoever reads the headers: what was worked out
    from them once need not be worked out again.
    """

    __slots__ = ("authority", "content_length", "fields", "memo", "method", "path", "scheme")

    def __init__(self, pseudo: dict[bytes, bytes], fields: tuple[Field, ...], content_length: int) -> None:
        self.method = pseudo.get(b":method", b"")
        self.scheme = pseudo.get(b":scheme", b"")
        """Empty, like the path, for CONNECT."""
        self.authority = pseudo.get(b":authority", b"")
        self.path = pseudo.get(b":path", b"")
        self.fields = fields
        self.content_length = content_length
        """-1 if there is none."""
        self.memo: Any = None

    def get(self, name: bytes) -> bytes | None:
        """Return the value of the first field called ``name``, which is lower case."""
        for field_name, value in self.fields:
            if field_name == name:
                return value
        return None


class Kept(dict[bytes, Headers]):
    """Headers by the bytes of their blocks. Weak references to it are possible."""

    __slots__ = ("__weakref__",)
    __weakref__: Any


Keep: TypeAlias = Callable[[Kept, bytes, Headers, int], None]
"""Puts headers of about so many bytes into the dictionary of a connection, by their block; or does not, or removes them
later: how much all connections keep is for their owner to say."""


class PartialBlock:
    """A header block that goes on in CONTINUATION frames, during which the peer may send nothing else."""

    __slots__ = ("_continuations", "_limits", "_since", "block", "flags", "stream_id")

    def __init__(self, limits: Limits, flags: int, stream_id: int, block: bytes, now: float) -> None:
        self._limits = limits
        self._since = now
        self._continuations = 0
        self.flags = flags
        """Of the HEADERS frame."""
        self.stream_id = stream_id
        self.block = bytearray(block)

    def add(self, payload: bytes, now: float) -> None:
        """Append one frame's payload. Raises ``ProtocolError`` when it becomes too much, or takes too long."""
        self.block += payload
        self._continuations += 1
        limits = self._limits
        if len(self.block) > limits.max_header_block or self._continuations > limits.max_continuations:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if now - self._since > limits.header_block_seconds:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "a header block takes too long")


class HeaderReader:
    """Turns the blocks of one connection into headers."""

    __slots__ = ("_decoder", "_keep", "kept")

    def __init__(self, limits: Limits, keep: Keep) -> None:
        self._decoder = FieldDecoder(limits.max_header_list_size)
        self._keep = keep
        self.kept = Kept()
        """Headers by block, for blocks that mean the same as they did last time. The connection looks here first."""

    def request(self, block: bytes) -> Headers:
        """Decode and check the block of a request.

        Raises ``Malformed`` for the stream's sake, after which the connection may go on, and ``ProtocolError`` for
        the connection's.
        """
        changes = self._decoder.changes
        fields = list(map(_stripped, self._decode(block)))
        size = _HEADERS + len(block)
        for field in fields:
            length = len(field[0]) + len(field[1])
            size += 3 * length + _FIELD
            if field not in _checked:
                _check(*field)
                if length <= _LONGEST_FIELD:
                    if len(_checked) >= _MOST_FIELDS:
                        _checked.clear()
                    _checked.add(field)
        headers = _assembled(fields)
        if self._decoder.changes == changes and len(block) <= _LONGEST_BLOCK:
            self._keep(self.kept, block, headers, size)
        return headers

    def trailers(self, block: bytes) -> None:
        """Decode and check the block that ends a request. Raises as ``request`` does; what it says is dropped."""
        for name, value in self._decode(block):
            if not _valid_name(name) or name in _CONNECTION_SPECIFIC or not _valid_value(value):
                raise Malformed("a trailer is not allowed")

    def discard(self, block: bytes) -> None:
        """Follow what the block does to the dynamic table, and no more. Raises ``ProtocolError``."""
        with suppress(Malformed):
            self._decode(block)

    def _decode(self, block: bytes) -> list[Field]:
        changes = self._decoder.changes
        try:
            return self._decoder.decode(block)
        except FieldsTooLarge as error:
            raise Malformed("the header list is too large", ErrorCode.ENHANCE_YOUR_CALM) from error
        finally:
            if self._decoder.changes != changes:
                self.kept.clear()


def _stripped(field: Field) -> Field:
    """Return a regular field without blanks at the ends of its value, which gRPC allows clients to write."""
    name, value = field
    regular = not name.startswith(b":")
    return (name, value.strip(b" \t")) if regular and (value[:1].isspace() or value[-1:].isspace()) else field


def _check(name: bytes, value: bytes) -> None:
    """Raise ``Malformed`` if a request may not carry this field, whatever else it carries."""
    if not _valid_value(value):
        raise Malformed("a field value is not allowed")
    if name in _PSEUDO:
        return
    if not _valid_name(name):
        raise Malformed("a field name is not allowed")
    if name in _CONNECTION_SPECIFIC:
        raise Malformed("a field is specific to HTTP/1 connections")
    if name == b"te" and value.lower() != b"trailers":
        raise Malformed("te is not trailers")
    if name == b"content-length" and not (value.isdigit() and len(value) < 20):
        raise Malformed("content-length is not a number")


def _assembled(fields: Sequence[Field]) -> Headers:
    """Return ``fields``, each of which was checked, as the headers of a request; raises ``Malformed``."""
    pseudo: dict[bytes, bytes] = {}
    content_length = -1
    for position, (name, value) in enumerate(fields):
        if name in _PSEUDO:
            if name in pseudo or len(pseudo) != position:
                raise Malformed("a pseudo header is repeated, or comes after a field")
            pseudo[name] = value
        elif name == b"content-length":
            if content_length not in (-1, int(value)):
                raise Malformed("content-length is repeated")
            content_length = int(value)
    method = pseudo.get(b":method")
    if method == b"CONNECT":
        if b":authority" not in pseudo or len(pseudo) != 2:
            raise Malformed("CONNECT takes an authority, and no scheme or path")
    elif not (method and pseudo.get(b":scheme") and pseudo.get(b":path")):
        raise Malformed("a pseudo header is missing")
    return Headers(pseudo, tuple(fields[len(pseudo) :]), content_length)


def encode_headers(fields: Iterable[Field]) -> bytes:
    """Encode the headers or trailers of a reply, ``:status`` first. The result may be kept and sent on any connection.

    Raises ``ValueError`` for a name or value that may not be sent: never let a client's text become a second header.
    """
    checked = list(fields)
    for name, value in checked:
        if not (_valid_name(name) or name == b":status") or not _valid_value(value):
            raise ValueError(f"not a header: {name!r}: {value!r}")
    return encode_fields(checked)
