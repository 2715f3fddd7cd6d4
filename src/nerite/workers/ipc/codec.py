"""Encoding of requests and responses in messages: one codec for both.

    record    header key, 0; inline tensor data
              header key, 1 + id length; a table of placements; id; inline tensor data
              NEW, 1 + id length; key, size; JSON: header, forgotten keys; table, id and data as above
              ERROR, 0; size; JSON: code and message
              NOTHING, 0
              AGAIN, 0; a record of states, or NOTHING

A header (``RequestHeader``, ``ResponseHeader``) is sent with the first record that has it, and is referred to by its
key afterwards. The sender assigns the keys, caches headers up to a budget in bytes, and lists with the next NEW record
those that it has evicted: the receiver drops the same ones, and only then are their keys reused. Records are read in
the order in which they were packed, so both sides agree. A large header is sent each time, with the key ``KEEP_NONE``.
If every tensor of a record is inline and its size follows from the header there is no table: the usual small request
costs sixteen bytes.

A message is packed as a whole or not at all: ``Packer.withdraw`` undoes the effects of a record that failed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from nerite.core import headers
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import Internal, NeriteError
from nerite.core.failures import report
from nerite.core.request import RequestHeader
from nerite.core.response import InferenceResponse, Reschedule, ResponseHeader
from nerite.core.signature import shape_text
from nerite.core.tensor import ABSENT, Buffer, DeviceBuffer, TensorData, TensorSpec, address_of
from nerite.core.text import quoted_text
from nerite.devices import exchange
from nerite.workers.ipc import messages
from nerite.workers.ipc.messages import PADDING
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases

_RECORD: Final = struct.Struct("<II")
RECORD_SIZE: Final = _RECORD.size
"""Bytes of a plain record before its data."""
_PLACE: Final = struct.Struct("<QQII")
_SIZE: Final = struct.Struct("<Q")

INLINE_LIMIT: Final = 32 * 1024
"""Tensors of at least this many bytes go through the arena."""
_REMEMBERED: Final = 640
_TENSOR: Final = 192
"""Bytes of memory that a cached header and each of its tensors take beyond the header itself."""
_ERROR: Final = 0xFFFFFFFF
_NOTHING: Final = 0xFFFFFFFE
_AGAIN: Final = 0xFFFFFFFD
_NEW: Final = 0xFFFFFFFC
KEEP_NONE: Final = 0xFFFFFFFF
_INLINE: Final = 0
_RECEIVERS: Final = 0x80000000
"""Flag: the data is in the receiver's own arena, because an input is returned as an output."""
_ON_DEVICE: Final = 0x20000000
"""Flag: the data is in the server's pool on the GPU whose number is that of the segment."""
_NO_RECORD: Final = _RECORD.pack(_NOTHING, 0)
_AGAIN_RECORD: Final = _RECORD.pack(_AGAIN, 0)

Header = TypeVar("Header", RequestHeader, ResponseHeader)


class HeaderEntry(Generic[Header]):
    """A header, with the layout of its tensors in plain records."""

    __slots__ = ("extent", "header", "key", "layout", "plain", "record", "sizes")

    def __init__(self, header: Header) -> None:
        specs = _specs(header)
        self.header: Header = header
        self.key = KEEP_NONE
        """Key in the packer's table."""
        self.record = b""
        """Beginning of a plain record."""
        self.plain = all(0 <= spec.byte_size < INLINE_LIMIT for spec in specs)
        self.sizes = [spec.byte_size for spec in specs]
        """Sizes of the tensors; -1 if the size depends on the data."""
        self.layout: list[tuple[int, int]] = []
        at = _RECORD.size
        for spec in specs:
            self.layout.append((at, at + spec.byte_size))
            at += (spec.byte_size + 7) & ~7
        self.extent = at

    @property
    def footprint(self) -> int:
        """Bytes of memory that it takes, including the header."""
        header = self.header
        of = headers.request_header_bytes if isinstance(header, RequestHeader) else headers.response_header_bytes
        return _REMEMBERED + _TENSOR * len(self.sizes) + of(header)


class HeaderTable(Generic[Header]):
    """Header cache of a packer. An entry gets a key when the budget inserts it, and may be evicted at any time."""

    __slots__ = ("__weakref__", "_known_free", "entries", "free_keys", "key_count")
    __weakref__: Any

    def __init__(self) -> None:
        self.entries: dict[Header, HeaderEntry[Header]] = {}
        self.free_keys: list[int] = []
        """Unused keys."""
        self._known_free = 0
        """Number of keys at the front of ``free_keys`` that the receiver knows to be unused."""
        self.key_count = 0
        """Number of keys that were assigned so far."""

    def __setitem__(self, header: Header, entry: HeaderEntry[Header]) -> None:
        if self.free_keys:
            entry.key = self.free_keys.pop()
            self._known_free = min(self._known_free, len(self.free_keys))
        else:
            entry.key = self.key_count
            self.key_count += 1
        entry.record = _RECORD.pack(entry.key, 0)
        self.entries[header] = entry

    def pop(self, header: Header, _: None = None) -> None:
        """Evict an entry, if it exists, and free its key."""
        entry = self.entries.pop(header, None)
        if entry is not None:
            self.free_keys.append(entry.key)

    def forgotten(self) -> list[int]:
        """Return the keys that the receiver has to drop and was not told of."""
        forgotten = self.free_keys[self._known_free :]
        self._known_free = len(self.free_keys)
        return forgotten

    def withdraw(self, entries: Sequence[HeaderEntry[Header]]) -> None:
        """Evict entries of a message that was not sent; the keys that it listed as dropped are listed again."""
        for entry in entries:
            if self.entries.get(entry.header) is entry:
                self.pop(entry.header)
        self._known_free = 0


class DeviceLender(Protocol):
    """Places tensors in the server's pools of GPU memory, which the other process can open."""

    def place(self, buffer: DeviceBuffer) -> tuple[int, DeviceBuffer] | None:
        """Return where a tensor begins in the pool of its GPU, possibly as a copy, and what to keep meanwhile.

        None if it cannot be there: it is sent from the host.
        """


class DeviceViewer(Protocol):
    """Finds tensors in the server's pools of GPU memory."""

    def base(self, device: int, offset: int, size: int) -> tuple[int, object]:
        """Return the address at which a pool begins here, and what keeps ``size`` bytes at ``offset`` allocated."""


class Packer(Generic[Header]):
    """The sending half of the codec: maps headers to keys, and tensors to places in memory."""

    __slots__ = (
        "_arena",
        "_borrower",
        "_budget",
        "_buffer_leases",
        "_describe",
        "_device_lender",
        "_elsewhere",
        "_marked",
        "_new",
        "entries",
        "table",
    )

    def __init__(
        self,
        arena: Arena,
        buffer_leases: BufferLeases,
        borrower: BufferBorrower,
        budget: ByteBudget,
        elsewhere: Callable[[memoryview, int], tuple[int, int] | None] = lambda _view, _address: None,
        describe: Callable[[Header], dict[str, Any]] = headers.header_to_json,
        device_lender: DeviceLender | None = None,
    ) -> None:
        """``budget`` bounds the cached headers. ``describe`` returns the JSON form of a header.

        ``elsewhere`` returns segment and offset of a view, given its address, in other memory that the receiver maps.
        The receiver may write there, too, unless the view is read-only.
        """
        self._elsewhere = elsewhere
        self._device_lender = device_lender
        self._describe: Callable[[Header], dict[str, Any]] = describe
        self._arena = arena
        self._buffer_leases = buffer_leases
        self._borrower = borrower
        self._budget = budget
        self.table: HeaderTable[Header] = HeaderTable()
        self.entries: dict[Header, HeaderEntry[Header]] = self.table.entries
        self._new: list[HeaderEntry[Header]] = []
        """Entries that the current message introduces."""
        self._marked = 0

    def begin(self) -> None:
        """Begin a message, which ends by being sent or withdrawn."""
        self._marked = self._buffer_leases.mark
        if self._new:
            self._new.clear()

    def withdraw(self) -> None:
        """Undo everything packed since ``begin``, which is not sent."""
        self._buffer_leases.revoke(self._marked)
        self.table.withdraw(self._new)
        self._new.clear()

    def record(self, header: Header, name: str, data: Sequence[TensorData], parts: list[Buffer]) -> None:
        """Append one request or response to ``parts``.

        Raises if it cannot be packed: then the message has to be withdrawn.
        """
        entry = self.entries.get(header)
        if self._device_lender is not None and any(isinstance(each, DeviceBuffer) for each in data):
            self._placed_record(header, name, data, parts)
            return
        if entry is not None and entry.plain and not name:
            parts.append(entry.record)
            sizes = entry.sizes
            at = 0
            on_host: Any = data
            for buffer in on_host:
                if (size := len(buffer)) != sizes[at]:
                    while parts.pop() is not entry.record:
                        pass
                    break
                parts.append(buffer)
                if odd := size & 7:
                    parts.append(PADDING[odd])
                at += 1  # noqa: SIM113  # enumerate costs more
            else:
                return
        self._placed_record(header, name, data, parts)

    def _placed_record(self, header: Header, name: str, data: Sequence[TensorData], parts: list[Buffer]) -> None:
        """Append a request or response with a table of places."""
        entry = self.entries.get(header)
        raw = name.encode()
        if entry is None:
            entry = self._introduce(header, 1 + len(raw), parts)
        else:
            parts.append(_RECORD.pack(entry.key, 1 + len(raw)))
        sizes = entry.sizes
        at = 0
        for buffer in data:
            if len(buffer) != sizes[at] and sizes[at] >= 0 and buffer is not ABSENT:
                raise _misfit(_specs(header)[at], buffer)
            at += 1  # noqa: SIM113
        self.buffers(raw, data, parts)

    def buffers(self, name: bytes, data: Sequence[TensorData], parts: list[Buffer]) -> None:
        """Append a table of placements, ``name``, and the buffers that are not placed in shared memory."""
        inline: list[Buffer] = []
        for buffer in data:
            if isinstance(buffer, DeviceBuffer) and (place := self._lend_on_device(buffer)) is not None:
                parts.append(place)
                continue
            buffer = exchange.on_host(buffer)
            size = len(buffer)
            if size >= INLINE_LIMIT and (place := self._lend(memoryview(buffer))) is not None:
                parts.append(place)
            else:
                parts.append(_PLACE.pack(size, 0, _INLINE, 0))
                inline += (buffer, PADDING[size & 7])
        parts += (name, PADDING[len(name) & 7], *inline)

    def _introduce(self, header: Header, name: int, parts: list[Buffer]) -> HeaderEntry[Header]:
        """Append the beginning of a record that contains its header; cache the header unless it is large."""
        entry, table = HeaderEntry(header), self.table
        self._budget.put(table, header, entry, entry.footprint)
        key = KEEP_NONE
        if self.entries.get(header) is entry:  # else it is too large, or was evicted at once
            key = entry.key
            self._new.append(entry)
        text = json.dumps([self._describe(header), table.forgotten()]).encode()
        size = len(text)
        parts += (_RECORD.pack(_NEW, name), _RECORD.pack(key, size), text, PADDING[size & 7])
        return entry

    def _lend_on_device(self, buffer: DeviceBuffer) -> bytes | None:
        borrowed = self._borrower.find(buffer.address, buffer.size)
        if borrowed is not None:
            device, offset, token = borrowed
            return _PLACE.pack(buffer.size, offset, device | _RECEIVERS | _ON_DEVICE, token)
        placed = None if self._device_lender is None else self._device_lender.place(buffer)
        if placed is None:
            return None
        offset, kept = placed
        token = self._buffer_leases.lend(kept, offset)
        return _PLACE.pack(buffer.size, offset, buffer.device | _ON_DEVICE, token)

    def _lend(self, view: memoryview) -> bytes | None:
        size = len(view)
        address = address_of(view)
        # Read-only data may have other readers, and the receiver may write to its own memory and to the arena.
        place = self._elsewhere(view, address) if view.readonly else None
        if place is None:
            borrowed = self._borrower.find(address, size)
            if borrowed is not None:
                segment, offset, token = borrowed
                return _PLACE.pack(size, offset, (segment + 1) | _RECEIVERS, token)
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
        return _PLACE.pack(size, offset, segment + 1, self._buffer_leases.lend(view, offset))


class Unpacker(Generic[Header]):
    """The receiving half of the codec."""

    __slots__ = ("_borrower", "_buffer_leases", "_device_viewer", "_read", "entries")

    def __init__(
        self,
        buffer_leases: BufferLeases,
        borrower: BufferBorrower,
        read: Callable[[dict[str, Any]], Header],
        device_viewer: DeviceViewer | None = None,
    ) -> None:
        """``read`` makes a header from the JSON of ``headers.header_to_json``."""
        self._device_viewer = device_viewer
        self._buffer_leases = buffer_leases
        self._borrower = borrower
        self._read: Callable[[dict[str, Any]], Header] = read
        self.entries: dict[int, HeaderEntry[Header]] = {}

    def record(
        self, body: memoryview, at: int
    ) -> tuple[Header | NeriteError | type[Reschedule] | None, str, list[TensorData], int]:
        """Return header (or error or None), id, tensors, and where the next record begins.

        ``Reschedule`` stands for a request that is to run again; the record of its states is the next one.
        """
        key, name_size = _RECORD.unpack_from(body, at)
        if key < _NEW:
            entry = self.entries[key]
            if not name_size:
                return entry.header, "", [body[at + a : at + b] for a, b in entry.layout], at + entry.extent
            at += _RECORD.size
        elif key == _NEW:
            entry, at = self._introduced(body, at + _RECORD.size)
        elif key == _ERROR:
            return self._error(body, at)
        else:
            return (Reschedule if key == _AGAIN else None), "", [], at + _RECORD.size
        name, data, at = self.buffers(body, at, name_size - 1, len(entry.layout))
        return entry.header, name.decode(), data, at

    def buffers(self, body: memoryview, at: int, name_size: int, count: int) -> tuple[bytes, list[TensorData], int]:
        """Return the name and the ``count`` buffers that ``Packer.buffers`` appended, and where they end."""
        places = [_PLACE.unpack_from(body, at + index * _PLACE.size) for index in range(count)]
        at += len(places) * _PLACE.size
        name = bytes(body[at : at + name_size])
        at += (name_size + 7) & ~7
        data: list[TensorData] = []
        for size, offset, segment, token in places:
            if segment == _INLINE:
                data.append(body[at : at + size])
                at += (size + 7) & ~7
            elif segment & _RECEIVERS:
                data.append(self._buffer_leases.part(token, offset, size))
            elif segment & _ON_DEVICE:
                assert self._device_viewer is not None
                device = segment & ~_ON_DEVICE
                base, memory = self._device_viewer.base(device, offset, size)
                data.append(self._borrower.device_view(device, base, offset, size, token, memory))
            else:
                data.append(self._borrower.view(segment - 1, offset, size, token))
        return name, data, at

    def _introduced(self, body: memoryview, at: int) -> tuple[HeaderEntry[Header], int]:
        """Return the header of a NEW record, cached if it has a key, and where its placements begin."""
        key, size = _RECORD.unpack_from(body, at)
        at += _RECORD.size
        described, forgotten = json.loads(bytes(body[at : at + size]))
        for each in forgotten:
            self.entries.pop(each, None)
        entry = HeaderEntry(self._read(described))
        if key != KEEP_NONE:
            self.entries[key] = entry
        return entry, at + ((size + 7) & ~7)

    def _error(self, body: memoryview, at: int) -> tuple[NeriteError, str, list[TensorData], int]:
        at += _RECORD.size
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        return messages.read_error(body[at : at + size]), "", [], at + ((size + 7) & ~7)


def _specs(header: RequestHeader | ResponseHeader) -> Sequence[TensorSpec]:
    return header.inputs if isinstance(header, RequestHeader) else header.outputs


def _misfit(spec: TensorSpec, buffer: TensorData) -> NeriteError:
    """Return the error for a tensor whose size differs from that in its header."""
    return Internal(
        f"tensor '{quoted_text(spec.name)}' has {len(buffer)} bytes, but {spec.datatype.name} "
        f"{shape_text(spec.shape)} takes {spec.byte_size}: its array was resized after the Tensor was made. "
        "Make the Tensor from the array in its final size"
    )


def request_unpacker(
    buffer_leases: BufferLeases, borrower: BufferBorrower, device_viewer: DeviceViewer | None = None
) -> Unpacker[RequestHeader]:
    """Return the receiving half of the codec for requests."""
    return Unpacker(buffer_leases, borrower, headers.request_header_from_json, device_viewer)


def response_unpacker(
    buffer_leases: BufferLeases, borrower: BufferBorrower, device_viewer: DeviceViewer | None = None
) -> Unpacker[ResponseHeader]:
    """Return the receiving half of the codec for responses."""
    return Unpacker(buffer_leases, borrower, headers.response_header_from_json, device_viewer)


def response_record(packer: Packer[ResponseHeader], response: InferenceResponse | None, parts: list[Buffer]) -> None:
    """Append a response to ``parts``; NOTHING for None and for an empty one. Raises as ``Packer.record``."""
    if response is not None and response.again:
        parts.append(_AGAIN_RECORD)
    if response is None or response.empty:
        parts.append(_NO_RECORD)
    elif response.error is not None:
        error_record(response.error, parts)
    else:
        assert response.header is not None
        packer.record(response.header, "", response.data, parts)


def sendable_response(packer: Packer[ResponseHeader], response: InferenceResponse | None) -> list[Buffer]:
    """Return the record of a response as the only one of a message; an error if the response cannot be packed."""
    parts: list[Buffer] = []
    packer.begin()
    try:
        response_record(packer, response, parts)
    except Exception as error:
        packer.withdraw()
        parts.clear()
        failure = error if isinstance(error, NeriteError) else report("channel", error, "while a response was packed")
        error_record(failure, parts)
    return parts


def read_response(
    unpacker: Unpacker[ResponseHeader], body: memoryview, at: int
) -> tuple[InferenceResponse | None, int]:
    """Return the response of a record, None for NOTHING, and where the next record begins."""
    header, _, data, at = unpacker.record(body, at)
    if isinstance(header, ResponseHeader):
        return InferenceResponse(header, data), at
    if isinstance(header, NeriteError):
        return InferenceResponse.failed(header), at
    if header is None:
        return None, at
    states, _, data, at = unpacker.record(body, at)
    return Reschedule(states if isinstance(states, ResponseHeader) else None, data), at


def read_responses(
    unpacker: Unpacker[ResponseHeader], body: memoryview, at: int, count: int
) -> tuple[list[InferenceResponse | None], int]:
    """Return the responses of ``count`` records, and where they end."""
    responses: list[InferenceResponse | None] = []
    known, unpack = unpacker.entries.get, _RECORD.unpack_from
    for _ in range(count):
        key, name_size = unpack(body, at)
        entry = None if name_size else known(key)
        if entry is None:
            response, at = read_response(unpacker, body, at)
        else:  # a plain record, which is the usual case
            response = InferenceResponse(entry.header, [body[at + a : at + b] for a, b in entry.layout])
            at += entry.extent
        responses.append(response)
    return responses, at


def error_record(error: NeriteError, parts: list[Buffer]) -> None:
    """Append the record of an error."""
    raw = json.dumps(messages.error_json(error)).encode()
    parts += (_RECORD.pack(_ERROR, 0), _SIZE.pack(len(raw)), raw, PADDING[len(raw) & 7])
