"""HPACK (RFC 7541): decoding with a dynamic table, encoding without one.

The static table and the Huffman code come from the ``hpack`` package. Its decoder is not used, for three reasons: it
takes more than twice as long for a block whose only news is one field, which is what some clients with deadlines send
on every call; it does not say whether a block changed the table, which is what a cache of blocks has to know; and it
gives up in the middle of an oversized list, after which the table and with it the connection is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from nerite.http2.frames import ErrorCode, ProtocolError
from nerite.http2.settings import DEFAULT_HEADER_TABLE_SIZE

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
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "the header block is malformed") from error

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
