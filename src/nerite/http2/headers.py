"""Headers: decoded by HPACK, validated against RFC 9113 section 8, and interned by the bytes of their block.

Also encodes the headers that we send.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from nerite.http2.frames import Http2ErrorCode, ProtocolError
from nerite.http2.limits import DEFAULT_HEADER_TABLE_SIZE, Limits

# HPACK (RFC 7541): decoding with a dynamic table, encoding without one.
#
# The static table and the Huffman code come from the ``hpack`` package. Its decoder is not used, for three reasons: it
# takes more than twice as long for a block with a single new field, which some clients with deadlines send on every
# call; it does not report whether a block changed the table, which a cache of blocks must know; and it stops in the
# middle of an oversized list, which leaves the table inconsistent and the connection unusable.

Field: TypeAlias = tuple[bytes, bytes]

FIELD_OVERHEAD: Final = 32
"""Overhead of a field beyond its name and value, in table sizes and list sizes."""
EMPTY_TABLE: Final = b"\x20"
"""Dynamic table size update to 0. A peer that shrinks its table must receive one before our next field."""

_NO_FIELD: Final = (b"", b"")
_STATIC: Final[tuple[Field, ...]] = (_NO_FIELD, *HeaderTable.STATIC_TABLE)
_FIRST_DYNAMIC: Final = len(_STATIC)
_INDEX_OF_FIELD: Final = {field: index for index, field in reversed(list(enumerate(_STATIC))) if index}
_INDEX_OF_NAME: Final = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC))) if index}

# Repeated strings (authorities, user agents, deadlines of a few sizes) are most of the remaining work. Longer ones are
# not cached, so that a client cannot fill the memory.
_LONGEST_KEPT: Final = 64
_decode_short: Final = lru_cache(maxsize=1024)(decode_huffman)


class FieldsTooLarge(Exception):
    """The header list is too large. The table is up to date, so the connection can continue."""


class FieldDecoder:
    """HPACK decoder of one connection."""

    __slots__ = ("_capacity", "_max_list_size", "_size", "_table", "changes")

    def __init__(self, max_list_size: int) -> None:
        self._max_list_size = max_list_size
        self._table: deque[Field] = deque()
        """Newest last, so that indexes count from the end."""
        self._size = 0
        self._capacity = DEFAULT_HEADER_TABLE_SIZE
        self.changes = 0
        """Number of table changes: the meaning of a block depends on the table."""

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a complete block, in order.

        Raises ``ProtocolError`` if the block is not HPACK, and ``FieldsTooLarge`` after decoding all of it.
        """
        try:
            return self._decode(block)
        except (IndexError, HPACKDecodingError) as error:
            # Any access beyond the end of the block or of a table raises IndexError.
            raise ProtocolError(Http2ErrorCode.COMPRESSION_ERROR, "the header block is malformed") from error

    def _decode(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        table = self._table
        room = self._max_list_size
        position = 0
        end = len(block)
        while position < end:
            first = block[position]
            position += 1
            if first & 0x80:  # an indexed field
                index = first & 0x7F
                if index == 0x7F:
                    index, position = _integer(block, position, 0x7F)
                if index >= _FIRST_DYNAMIC:
                    field = table[_FIRST_DYNAMIC - 1 - index]
                elif index:
                    field = _STATIC[index]
                else:
                    raise IndexError
            elif first & 0xE0 == 0x20:  # a new size for the dynamic table
                capacity = first & 0x1F
                if capacity == 0x1F:
                    capacity, position = _integer(block, position, 0x1F)
                if fields or capacity > DEFAULT_HEADER_TABLE_SIZE:
                    raise IndexError
                self._capacity = capacity
                self._shrink()
                continue
            else:  # a literal value with a literal or indexed name
                mask = 0x3F if first & 0x40 else 0x0F
                index = first & mask
                if index == mask:
                    index, position = _integer(block, position, mask)
                if index >= _FIRST_DYNAMIC:
                    name = table[_FIRST_DYNAMIC - 1 - index][0]
                elif index:
                    name = _STATIC[index][0]
                else:
                    name, position = _string(block, position)
                value, position = _string(block, position)
                field = (name, value)
                if first & 0x40:
                    table.append(field)
                    self._size += len(name) + len(value) + FIELD_OVERHEAD
                    self._shrink()
            room -= len(field[0]) + len(field[1]) + FIELD_OVERHEAD
            if room >= 0:
                fields.append(field)
        if room < 0:
            raise FieldsTooLarge
        return fields

    def _shrink(self) -> None:
        """Count a change of the table, and evict the oldest fields until it fits its capacity."""
        self.changes += 1
        while self._size > self._capacity:
            name, value = self._table.popleft()
            self._size -= len(name) + len(value) + FIELD_OVERHEAD


def _integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """Decode the continuation of an integer whose prefix is full; return the value and the position after it."""
    value = prefix
    for shift in (0, 7, 14, 21, 28):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError  # no valid block needs more than 32 bits


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Return the string at ``position``, and the position after it."""
    first = block[position]
    position += 1
    length = first & 0x7F
    if length == 0x7F:
        length, position = _integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise IndexError
    string = block[position:end]
    if first & 0x80:
        string = _decode_short(string) if length <= _LONGEST_KEPT else decode_huffman(string)
    return string, end


def encode_fields(fields: Iterable[Field]) -> bytes:
    """Encode ``fields`` without the dynamic table, so that the block is valid on any connection at any time."""
    block = bytearray()
    for name, value in fields:
        index = _INDEX_OF_FIELD.get((name, value))
        if index:
            block.append(0x80 | index)
            continue
        index = _INDEX_OF_NAME.get(name, 0)
        _append_integer(block, index, 0x0F)
        if not index:
            _append_integer(block, len(name), 0x7F)
            block += name
        _append_integer(block, len(value), 0x7F)
        block += value
    return bytes(block)


def _append_integer(block: bytearray, value: int, prefix: int) -> None:
    if value < prefix:
        block.append(value)
        return
    block.append(prefix)
    value -= prefix
    while value >= 0x80:
        block.append(value & 0x7F | 0x80)
        value >>= 7
    block.append(value)


_valid_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_valid_value = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?").fullmatch
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_STATUS: Final = b":status"
_valid_status = re.compile(rb"[1-5][0-9][0-9]").fullmatch
_CONNECTION_SPECIFIC: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_LONGEST_BLOCK: Final = 1_024
"""Maximum bytes of a block whose headers are interned."""
_HEADERS: Final = 2_048
"""Bytes in memory of headers with their memo, without their fields."""
_FIELD: Final = 160
"""Bytes in memory of a field without its text."""

# Fields known to be valid, shared by all connections: clients send few distinct short fields.
_MAX_FIELDS: Final = 4_096
_LONGEST_FIELD: Final = 128
_checked: Final[set[Field]] = set()


class MalformedHeaders(Exception):
    """The headers of a message are invalid: its stream is reset, the connection continues."""

    def __init__(self, reason: str, code: Http2ErrorCode = Http2ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


class HeaderFields:
    """Fields of a header block. Immutable, but for ``memo``, which is for the owner."""

    __slots__ = ("content_length", "fields", "memo")

    def __init__(self, fields: tuple[Field, ...], content_length: int) -> None:
        self.fields = fields
        self.content_length = content_length
        """-1 if absent."""
        self.memo: Any = None

    def get(self, name: bytes) -> bytes | None:
        """Return the value of the first field called ``name`` (lower case), or None."""
        for field_name, value in self.fields:
            if field_name == name:
                return value
        return None


class RequestHeaders(HeaderFields):
    """Headers of a request. Immutable and interned: requests with the same block share one object.

    ``fields`` are the regular fields in order. ``memo`` belongs to the handler, for results derived from the headers.
    """

    __slots__ = ("authority", "method", "path", "scheme")

    def __init__(self, pseudo: dict[bytes, bytes], fields: tuple[Field, ...], content_length: int) -> None:
        super().__init__(fields, content_length)
        self.method = pseudo.get(b":method", b"")
        self.scheme = pseudo.get(b":scheme", b"")
        """Empty, as is the path, for CONNECT."""
        self.authority = pseudo.get(b":authority", b"")
        self.path = pseudo.get(b":path", b"")


class ReplyHeaders(HeaderFields):
    """Headers of a response, or its trailers. Immutable and interned, as ``RequestHeaders`` are."""

    __slots__ = ("status",)

    def __init__(self, status: int, fields: tuple[Field, ...], content_length: int) -> None:
        super().__init__(fields, content_length)
        self.status = status
        """0 for trailers."""


H = TypeVar("H")


class HeaderMemo(dict[bytes, H]):
    """Headers by the bytes of their block. Supports weak references."""

    __slots__ = ("__weakref__",)
    __weakref__: Any


class RememberHeaders(Protocol):
    """Stores headers, of ``size`` bytes, under their block in a connection's memo.

    It may also skip or later evict them, because the owner of all connections bounds their memory.
    """

    def __call__(self, memo: HeaderMemo[H], key: bytes, value: H, size: int, /) -> None:
        """Store ``value``, or do nothing."""


class PartialBlock:
    """A header block continued in CONTINUATION frames, between which the peer may send nothing else."""

    __slots__ = ("_continuations", "_limits", "_since", "block", "flags", "stream_id")

    def __init__(self, limits: Limits, flags: int, stream_id: int, block: bytes, now: float) -> None:
        self._limits = limits
        self._since = now
        self._continuations = 0
        self.flags = flags
        """Flags of the HEADERS frame."""
        self.stream_id = stream_id
        self.block = bytearray(block)

    def add(self, payload: bytes, now: float) -> None:
        """Append one frame's payload. Raises ``ProtocolError`` if the block becomes too large or takes too long."""
        self.block += payload
        self._continuations += 1
        limits = self._limits
        if len(self.block) > limits.max_header_block or self._continuations > limits.max_continuations:
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if now - self._since > limits.header_block_seconds:
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block takes too long")


class BlockReader:
    """Decodes and validates the header blocks of one connection."""

    __slots__ = ("_decoder", "_keep")

    def __init__(self, limits: Limits, keep: RememberHeaders) -> None:
        self._decoder = FieldDecoder(limits.max_header_list_size)
        self._keep = keep

    def forget(self) -> None:
        """Drop all interned headers."""

    def discard(self, block: bytes) -> None:
        """Decode a block only for its effect on the dynamic table. Raises ``ProtocolError``."""
        with suppress(MalformedHeaders):
            self._decode(block)

    def _intern(self, kept: HeaderMemo[H], block: bytes, assembled: Callable[[Sequence[Field]], H]) -> H:
        """Decode ``block``, and keep what is ``assembled`` from its fields unless the block changed the table.

        Raises ``MalformedHeaders`` if only the stream must end, and ``ProtocolError`` if the connection must.
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
                    if len(_checked) >= _MAX_FIELDS:
                        _checked.clear()
                    _checked.add(field)
        headers = assembled(fields)
        if self._decoder.changes == changes and len(block) <= _LONGEST_BLOCK:
            self._keep(kept, block, headers, size)
        return headers

    def _decode(self, block: bytes) -> list[Field]:
        changes = self._decoder.changes
        try:
            return self._decoder.decode(block)
        except FieldsTooLarge as error:
            raise MalformedHeaders("the header list is too large", Http2ErrorCode.ENHANCE_YOUR_CALM) from error
        finally:
            if self._decoder.changes != changes:
                self.forget()


class HeaderReader(BlockReader):
    """Converts the header blocks of a client into ``RequestHeaders``."""

    __slots__ = ("kept",)

    def __init__(self, limits: Limits, keep: RememberHeaders) -> None:
        super().__init__(limits, keep)
        self.kept: HeaderMemo[RequestHeaders] = HeaderMemo()
        """Interned headers by block, valid for the current state of the table. The connection looks here first."""

    def request(self, block: bytes) -> RequestHeaders:
        """Decode and validate the header block of a request.

        Raises ``MalformedHeaders`` if only the stream must end, and ``ProtocolError`` if the connection must.
        """
        return self._intern(self.kept, block, _assembled)

    def trailers(self, block: bytes) -> None:
        """Decode, validate and discard the trailers of a request. Raises as ``request`` does."""
        for name, value in self._decode(block):
            if not _valid_name(name) or name in _CONNECTION_SPECIFIC or not _valid_value(value):
                raise MalformedHeaders("a trailer is not allowed")

    def forget(self) -> None:
        """Drop all interned headers."""
        self.kept.clear()


class ResponseReader(BlockReader):
    """Converts the header blocks of a server into ``ReplyHeaders``."""

    __slots__ = ("kept",)

    def __init__(self, limits: Limits, keep: RememberHeaders) -> None:
        super().__init__(limits, keep)
        self.kept: HeaderMemo[ReplyHeaders] = HeaderMemo()

    def response(self, block: bytes) -> ReplyHeaders:
        """Return the headers or trailers in ``block``. Raises as ``HeaderReader.request`` does."""
        return self.kept.get(block) or self._intern(self.kept, block, _assembled_response)

    def forget(self) -> None:
        """Drop all interned headers."""
        self.kept.clear()


def _stripped(field: Field) -> Field:
    """Strip spaces and tabs around the value of a regular field, which gRPC allows clients to send."""
    name, value = field
    regular = not name.startswith(b":")
    return (name, value.strip(b" \t")) if regular and (value[:1].isspace() or value[-1:].isspace()) else field


def _check(name: bytes, value: bytes) -> None:
    """Raise ``MalformedHeaders`` if the field is invalid in any message."""
    if not _valid_value(value):
        raise MalformedHeaders("a field value is not allowed")
    if name in _PSEUDO or name == _STATUS:
        return
    if not _valid_name(name):
        raise MalformedHeaders("a field name is not allowed")
    if name in _CONNECTION_SPECIFIC:
        raise MalformedHeaders("a field is specific to HTTP/1 connections")
    if name == b"te" and value.lower() != b"trailers":
        raise MalformedHeaders("te is not trailers")
    if name == b"content-length" and not (value.isdigit() and len(value) < 20):
        raise MalformedHeaders("content-length is not a number")


def _assembled(fields: Sequence[Field]) -> RequestHeaders:
    """Build request headers from individually valid ``fields``. Raises ``MalformedHeaders`` for a bad combination."""
    pseudo: dict[bytes, bytes] = {}
    content_length = -1
    for position, (name, value) in enumerate(fields):
        if name in _PSEUDO:
            if name in pseudo or len(pseudo) != position:
                raise MalformedHeaders("a pseudo header is repeated, or comes after a field")
            pseudo[name] = value
        elif name == _STATUS:
            raise MalformedHeaders("a request has no status")
        elif name == b"content-length":
            if content_length not in (-1, int(value)):
                raise MalformedHeaders("content-length is repeated")
            content_length = int(value)
    method = pseudo.get(b":method")
    if method == b"CONNECT":
        if b":authority" not in pseudo or len(pseudo) != 2:
            raise MalformedHeaders("CONNECT takes an authority, and no scheme or path")
    elif not (method and pseudo.get(b":scheme") and pseudo.get(b":path")):
        raise MalformedHeaders("a pseudo header is missing")
    return RequestHeaders(pseudo, tuple(fields[len(pseudo) :]), content_length)


def _assembled_response(fields: Sequence[Field]) -> ReplyHeaders:
    """Build response headers, or trailers, from individually valid ``fields``. Raises ``MalformedHeaders``."""
    status = 0
    content_length = -1
    for position, (name, value) in enumerate(fields):
        if name == _STATUS:
            if position or not _valid_status(value):
                raise MalformedHeaders("the status is not the first field, or not a number from 100 to 599")
            status = int(value)
        elif name in _PSEUDO:
            raise MalformedHeaders("a response has a pseudo header of requests")
        elif name == b"content-length":
            if content_length not in (-1, int(value)):
                raise MalformedHeaders("content-length is repeated")
            content_length = int(value)
    return ReplyHeaders(status, tuple(fields[1 if status else 0 :]), content_length)


def encode_headers(fields: Iterable[Field]) -> bytes:
    """Encode the headers or trailers of a reply, ``:status`` first. The result may be reused on any connection.

    Raises ``ValueError`` for an invalid name or value, so that a client's text cannot inject a header.
    """
    return _encoded(fields, (_STATUS,))


def encode_request(fields: Iterable[Field]) -> bytes:
    """Do the same with the headers of a request, pseudo headers first."""
    return _encoded(fields, _PSEUDO)


def _encoded(fields: Iterable[Field], pseudo: Collection[bytes]) -> bytes:
    checked = list(fields)
    for name, value in checked:
        if not (_valid_name(name) or name in pseudo) or not _valid_value(value):
            raise ValueError(f"not a header: {name!r}: {value!r}")
    return encode_fields(checked)
