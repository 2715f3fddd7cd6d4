"""Requests and responses as they lie in a message: one codec for both.

    record    header key, 0; inline tensor data
              header key, 1 + id length; a table of placements; id; inline tensor data
              ERROR, 0; size; JSON: code and message
              NOTHING, 0
              AGAIN, 0; a record of states, or NOTHING

A header (``RequestHeader``, ``ResponseHeader``) crosses once, in a message of its own, and is referred to by its key
afterwards. Both sides overwrite the keys in the same order, so they agree without further talk. A header whose key is
old is introduced again before it is used, so that no key is overwritten in the batch that uses it: introductions go
before the batch. Where every tensor of a record is inline and its size follows from the header there is no table: the
usual small request costs sixteen bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from nerite.core import header_form
from nerite.core.errors import NeriteError
from nerite.core.request import RequestHeader
from nerite.core.response import Again, InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec
from nerite.execution import messages
from nerite.execution.arena import Arena, Borrower, Loans, address_of
from nerite.execution.messages import PADDING

_RECORD: Final = struct.Struct("<II")
_PLACE: Final = struct.Struct("<QQII")
_SIZE: Final = struct.Struct("<Q")

INLINE_LIMIT: Final = 32 * 1024
"""A tensor of this many bytes or more goes through the arena."""
KEYS: Final = 4096
"""Headers that are remembered; twice as many as any batch has."""
_ERROR: Final = 0xFFFFFFFF
_NOTHING: Final = 0xFFFFFFFE
_AGAIN: Final = 0xFFFFFFFD
_INLINE: Final = 0
_YOURS: Final = 0x80000000
"""The data lies in the receiver's own arena: an input that is handed back as an output."""
_NO_RECORD: Final = _RECORD.pack(_NOTHING, 0)
_AGAIN_RECORD: Final = _RECORD.pack(_AGAIN, 0)

Header = TypeVar("Header", RequestHeader, ResponseHeader)


class _Entry(Generic[Header]):
    """A header that has a key, and where the tensors of its plain records are."""

    __slots__ = ("extent", "header", "layout", "number", "plain", "record")

    def __init__(self, number: int, header: Header, specs: Sequence[TensorSpec]) -> None:
        """``number`` counts introductions; the key is what is left of it by ``KEYS``."""
        self.number = number
        self.header: Header = header
        self.plain = all(0 <= spec.byte_size < INLINE_LIMIT for spec in specs)
        self.record = _RECORD.pack(number % KEYS, 0)
        self.layout: list[tuple[int, int]] = []
        at = _RECORD.size
        for spec in specs:
            self.layout.append((at, at + spec.byte_size))
            at += (spec.byte_size + 7) & ~7
        self.extent = at


class Packer(Generic[Header]):
    """The sending half of the codec: headers to keys, tensors to places."""

    __slots__ = ("_arena", "_borrower", "_elsewhere", "_entries", "_keys", "_loans", "_next")

    def __init__(
        self,
        arena: Arena,
        loans: Loans,
        borrower: Borrower,
        elsewhere: Callable[[memoryview, int], tuple[int, int] | None] = lambda _view, _address: None,
    ) -> None:
        """``elsewhere`` gives segment and offset of a view in other memory that the receiver maps, given its address.

        The receiver may write there, too, unless the view is for reading only.
        """
        self._elsewhere = elsewhere
        self._arena = arena
        self._loans = loans
        self._borrower = borrower
        self._entries: dict[Header, _Entry[Header]] = {}
        self._keys: list[Header | None] = [None] * KEYS
        self._next = 0

    def entry(self, header: Header, parts: list[Buffer]) -> _Entry[Header]:
        """Return the entry of ``header``; append the message that introduces it to ``parts``, if it needs one."""
        entry = self._entries.get(header)
        if entry is None or self._next - entry.number > KEYS // 2:
            if entry is not None:
                self._keys[entry.number % KEYS] = None
            number = self._next
            self._next += 1
            if (old := self._keys[number % KEYS]) is not None:
                del self._entries[old]
            self._keys[number % KEYS] = header
            if isinstance(header, RequestHeader):
                kind, entry = messages.REQUEST_HEADER, _Entry(number, header, header.inputs)
            else:
                kind, entry = messages.RESPONSE_HEADER, _Entry(number, header, header.outputs)
            self._entries[header] = entry
            parts.append(messages.json_frame(kind, header_form.describe(header)))
        return entry

    def record(self, entry: _Entry[Header], name: str, data: Sequence[Buffer], parts: list[Buffer]) -> None:
        """Append one request or response to ``parts``."""
        if entry.plain and not name:
            parts.append(entry.record)
            for buffer in data:
                parts.append(buffer)
                if odd := len(buffer) & 7:
                    parts.append(PADDING[odd])
            return
        raw = name.encode()
        (key,) = struct.unpack_from("<I", entry.record)
        inline: list[Buffer] = []
        places: list[bytes] = []
        for buffer in data:
            size = len(buffer)
            if size >= INLINE_LIMIT and (place := self._lend(memoryview(buffer))) is not None:
                places.append(place)
            else:
                places.append(_PLACE.pack(size, 0, _INLINE, 0))
                inline += (buffer, PADDING[size & 7])
        parts += (_RECORD.pack(key, 1 + len(raw)), *places, raw, PADDING[len(raw) & 7], *inline)

    def _lend(self, view: memoryview) -> bytes | None:
        size = len(view)
        address = address_of(view)
        # What is for reading only may have other readers, and the receiver writes into its own memory and the arena.
        place = self._elsewhere(view, address) if view.readonly else None
        if place is None:
            borrowed = self._borrower.find(address, size)
            if borrowed is not None:
                segment, offset, token = borrowed
                return _PLACE.pack(size, offset, (segment + 1) | _YOURS, token)
            place = self._arena.place(address) or (None if view.readonly else self._elsewhere(view, address))
        if place is None:
            copy = self._arena.allocate(size)
            if copy is None:
                return None
            copy[:] = view
            view = copy
            place = self._arena.place(address_of(view))
            assert place is not None
        segment, offset = place
        return _PLACE.pack(size, offset, segment + 1, self._loans.lend(view, offset))


class Unpacker(Generic[Header]):
    """The receiving half of the codec."""

    __slots__ = ("_borrower", "_entries", "_loans", "_next")

    def __init__(self, loans: Loans, borrower: Borrower) -> None:
        self._loans = loans
        self._borrower = borrower
        self._entries: list[_Entry[Header] | None] = [None] * KEYS
        self._next = 0

    def introduce(self, header: Header) -> None:
        """Take note of the header that the next key stands for."""
        number = self._next
        self._next += 1
        specs = header.inputs if isinstance(header, RequestHeader) else header.outputs
        self._entries[number % KEYS] = _Entry(number, header, specs)

    def record(
        self, body: memoryview, at: int
    ) -> tuple[Header | NeriteError | type[Again] | None, str, list[Buffer], int]:
        """Return header (or the error or the nothing in its place), id, tensors, and where the next record begins.

        ``Again`` stands for the word that a request is to run again; the record of its states is the next.
        """
        key, name_size = _RECORD.unpack_from(body, at)
        if key >= _AGAIN:
            if key == _ERROR:
                return self._error(body, at)
            return (Again if key == _AGAIN else None), "", [], at + _RECORD.size
        entry = self._entries[key]
        assert entry is not None
        if not name_size:
            return entry.header, "", [body[at + a : at + b] for a, b in entry.layout], at + entry.extent
        at += _RECORD.size
        places = [_PLACE.unpack_from(body, at + index * _PLACE.size) for index in range(len(entry.layout))]
        at += len(places) * _PLACE.size
        name_size -= 1
        name = bytes(body[at : at + name_size]).decode()
        at += (name_size + 7) & ~7
        data: list[Buffer] = []
        for size, offset, segment, token in places:
            if segment == _INLINE:
                data.append(body[at : at + size])
                at += (size + 7) & ~7
            elif segment & _YOURS:
                data.append(self._loans.part(token, offset, size))
            else:
                data.append(self._borrower.view(segment - 1, offset, size, token))
        return entry.header, name, data, at

    def _error(self, body: memoryview, at: int) -> tuple[NeriteError, str, list[Buffer], int]:
        at += _RECORD.size
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        return messages.read_error(body[at : at + size]), "", [], at + ((size + 7) & ~7)


def response_record(
    packer: Packer[ResponseHeader],
    response: InferenceResponse | None,
    introductions: list[Buffer],
    parts: list[Buffer],
) -> None:
    """Append a response to ``parts``; nothing for None and for one that is empty."""
    if response is not None and response.again:
        parts.append(_AGAIN_RECORD)
    if response is None or response.empty:
        parts.append(_NO_RECORD)
    elif response.error is not None:
        error_record(response.error, parts)
    else:
        assert response.header is not None
        packer.record(packer.entry(response.header, introductions), "", response.data, parts)


def read_response(
    unpacker: Unpacker[ResponseHeader], body: memoryview, at: int
) -> tuple[InferenceResponse | None, int]:
    """Return the response of a record, None for nothing, and where the next record begins."""
    header, _, data, at = unpacker.record(body, at)
    if isinstance(header, ResponseHeader):
        return InferenceResponse(header, data), at
    if isinstance(header, NeriteError):
        return InferenceResponse.failed(header), at
    if header is None:
        return None, at
    states, _, data, at = unpacker.record(body, at)
    return Again(states if isinstance(states, ResponseHeader) else None, data), at


def error_record(error: NeriteError, parts: list[Buffer]) -> None:
    """Append a response that is an error."""
    raw = json.dumps({"code": error.code, "message": error.message}).encode()
    parts += (_RECORD.pack(_ERROR, 0), _SIZE.pack(len(raw)), raw, PADDING[len(raw) & 7])
