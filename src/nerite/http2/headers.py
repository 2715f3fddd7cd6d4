"""Request headers: the fields of a block, checked against RFC 9113 section 8, and kept by the block's bytes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, TypeAlias

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from nerite.http2.frames import Http2ErrorCode, ProtocolError
from nerite.http2.limits import DEFAULT_HEADER_TABLE_SIZE, Limits

# HPACK (RFC 7541): decoding with a dynamic table, encoding without one.
#
# The static table and the Huffman code come from the ``hpack`` package. Its decoder is not used, for three reasons:
# it takes more than twice as long for a block whose only news is one field, which is what some clients with deadlines
# send on every call; it does not say whether a block changed the table, which is what a cache of blocks has to know;
# and it gives up in the middle of an oversized list, after which the table and with it the connection is lost.

Field: TypeAlias = tuple[bytes, bytes]

FIELD_OVERHEAD: Final = 32
"""What a field counts for beyond its name and value, in table and list sizes alike."""
EMPTY_TABLE: Final = b"\x20"
"""The dynamic table size update to 0. A peer that shrinks its table has to see one before our next field."""

_NO_FIELD: Final = (b"", b"")
_STATIC: Final[tuple[Field, ...]] = (_NO_FIELD, *HeaderTable.STATIC_TABLE)
_FIRST_DYNAMIC: Final = len(_STATIC)
_INDEX_OF_FIELD: Final = {field: index for index, field in reversed(list(enumerate(_STATIC))) if index}
_INDEX_OF_NAME: Final = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC))) if index}

# Repeated strings (authorities, user agents, deadlines of a few sizes) are most of what is left to decode. Longer
# ones are not kept, so that a stranger cannot fill the memory.
_LONGEST_KEPT: Final = 64
_decode_short: Final = lru_cache(maxsize=1024)(decode_huffman)


class FieldsTooLarge(Exception):
    """The list is larger than allowed. The table is up to date, so the connection may go on."""


class FieldDecoder:
    """The receiving half of HPACK on one connection."""

    __slots__ = ("_capacity", "_max_list_size", "_size", "_table", "changes")

    def __init__(self, max_list_size: int) -> None:
        self._max_list_size = max_list_size
        self._table: deque[Field] = deque()
        """Newest last, so that the index of a field counts from the end."""
        self._size = 0
        self._capacity = DEFAULT_HEADER_TABLE_SIZE
        self.changes = 0
        """How often the table changed: what a block means depends on it."""

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a complete block, in order.

        Raises ``ProtocolError`` if the block is not HPACK, and ``FieldsTooLarge`` after decoding all of it.
        """
        try:
            return self._decode(block)
        except (IndexError, HPACKDecodingError) as error:
            # Every way of running past the end of the block or of a table is an IndexError.
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
            if first & 0x80:  # a field of one of the tables
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
            else:  # a literal value, behind a name that is literal or of one of the tables
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
        """Note that the table changed, and drop the oldest fields until it fits."""
        self.changes += 1
        while self._size > self._capacity:
            name, value = self._table.popleft()
            self._size -= len(name) + len(value) + FIELD_OVERHEAD


def _integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """Return the integer whose prefix was full, and the position behind it."""
    value = prefix
    for shift in (0, 7, 14, 21, 28):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError  # beyond 32 bits nothing is meant seriously


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Return the string at ``position``, and the position behind it."""
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
    """Return a block that means ``fields`` on any connection at any time, as it has nothing to do with a table."""
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


class MalformedHeaders(Exception):
    """The request breaks a rule about headers: its stream is reset, the connection goes on."""

    def __init__(self, reason: str, code: Http2ErrorCode = Http2ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


class RequestHeaders:
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


class HeaderMemo(dict[bytes, RequestHeaders]):
    """RequestHeaders by the bytes of their blocks. Weak references to it are possible."""

    __slots__ = ("__weakref__",)
    __weakref__: Any


RememberHeaders: TypeAlias = Callable[[HeaderMemo, bytes, RequestHeaders, int], None]
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
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if now - self._since > limits.header_block_seconds:
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block takes too long")


class HeaderReader:
    """Turns the blocks of one connection into headers."""

    __slots__ = ("_decoder", "_keep", "kept")

    def __init__(self, limits: Limits, keep: RememberHeaders) -> None:
        self._decoder = FieldDecoder(limits.max_header_list_size)
        self._keep = keep
        self.kept = HeaderMemo()
        """RequestHeaders by block, for blocks that mean the same as they did last time.

        The connection looks here first.
        """

    def request(self, block: bytes) -> RequestHeaders:
        """Decode and check the block of a request.

        Raises ``MalformedHeaders`` for the stream's sake, after which the connection may go on, and ``ProtocolError``
        for the connection's.
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
                raise MalformedHeaders("a trailer is not allowed")

    def discard(self, block: bytes) -> None:
        """Follow what the block does to the dynamic table, and no more. Raises ``ProtocolError``."""
        with suppress(MalformedHeaders):
            self._decode(block)

    def _decode(self, block: bytes) -> list[Field]:
        changes = self._decoder.changes
        try:
            return self._decoder.decode(block)
        except FieldsTooLarge as error:
            raise MalformedHeaders("the header list is too large", Http2ErrorCode.ENHANCE_YOUR_CALM) from error
        finally:
            if self._decoder.changes != changes:
                self.kept.clear()


def _stripped(field: Field) -> Field:
    """Return a regular field without blanks at the ends of its value, which gRPC allows clients to write."""
    name, value = field
    regular = not name.startswith(b":")
    return (name, value.strip(b" \t")) if regular and (value[:1].isspace() or value[-1:].isspace()) else field


def _check(name: bytes, value: bytes) -> None:
    """Raise ``MalformedHeaders`` if a request may not carry this field, whatever else it carries."""
    if not _valid_value(value):
        raise MalformedHeaders("a field value is not allowed")
    if name in _PSEUDO:
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
    """Return ``fields``, each of which was checked, as the headers of a request; raises ``MalformedHeaders``."""
    pseudo: dict[bytes, bytes] = {}
    content_length = -1
    for position, (name, value) in enumerate(fields):
        if name in _PSEUDO:
            if name in pseudo or len(pseudo) != position:
                raise MalformedHeaders("a pseudo header is repeated, or comes after a field")
            pseudo[name] = value
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


def encode_headers(fields: Iterable[Field]) -> bytes:
    """Encode the headers or trailers of a reply, ``:status`` first. The result may be kept and sent on any connection.

    Raises ``ValueError`` for a name or value that may not be sent: never let a client's text become a second header.
    """
    checked = list(fields)
    for name, value in checked:
        if not (_valid_name(name) or name == b":status") or not _valid_value(value):
            raise ValueError(f"not a header: {name!r}: {value!r}")
    return encode_fields(checked)
