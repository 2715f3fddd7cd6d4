"""Groups of small records that have one header: the requests, or the responses, of one turn of the loop.

A record alone costs a frame, a head and a lookup of its header; in a group it costs its number and its data:

    GROUP     numbers of returned tokens, tokens; key, number of records; the calls' numbers; with requests, the times
              of their arrival; data of all records
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic

from nerite.core.tensor import Buffer
from nerite.workers.ipc import messages
from nerite.workers.ipc.codec import RECORD_SIZE, Header, HeaderEntry, Packer, Unpacker
from nerite.workers.ipc.messages import PADDING

_HEAD: Final = struct.Struct("<II")
_MOST: Final = 256
"""Records of a group. A larger one would delay the others of its turn."""


class _Group(Generic[Header]):
    """A group that is being filled."""

    __slots__ = ("count", "entry", "numbers", "padding", "parts", "size", "times")

    def __init__(self, entry: HeaderEntry[Header], count: int) -> None:
        self.entry: HeaderEntry[Header] = entry
        self.count = count
        self.size = entry.sizes[0] if len(entry.sizes) == 1 else -1
        """Size of the only tensor of each record; -1 if there are none or several."""
        self.padding = PADDING[self.size & 7] if self.size > 0 else b""
        self.numbers: list[int] = []
        self.times: list[int] = []
        self.parts: list[Buffer] = []


class GroupWriter(Generic[Header]):
    """Collects records by header. Order holds among the records of one header only."""

    def __init__(self, packer: Packer[Header], kind: int, emit: Callable[[int, int, int, list[Buffer]], None]) -> None:
        """``emit`` sends a message of ``kind``: kind, number, count and records."""
        self._entries: dict[Header, HeaderEntry[Header]] = packer.entries
        self._kind = kind
        self._emit = emit
        self._open: dict[Header, _Group[Header]] = {}

    def add(self, header: Header, number: int, data: Sequence[Buffer], count: int, time: int | None = None) -> bool:
        """Add a record; return False if it cannot be part of a group.

        ``count`` is that of the message, and the same for all records of a header. Either all records have a ``time``,
        or none has one.
        """
        group = self._open.get(header)
        if group is None:
            entry = self._entries.get(header)
            if entry is None or not entry.plain:
                return False
            group = self._open[header] = _Group(entry, count)
        parts = group.parts
        if group.size >= 0:
            (buffer,) = data
            if len(buffer) != group.size:
                return False
            parts.append(buffer)
            if group.padding:
                parts.append(group.padding)
        else:
            if [*map(len, data)] != group.entry.sizes:
                return False
            for buffer in data:
                parts += (buffer, PADDING[len(buffer) & 7])
        group.numbers.append(number)
        if time is not None:
            group.times.append(time)
        if len(group.numbers) == _MOST:
            del self._open[header]
            self._close(group)
        return True

    def close(self) -> None:
        """Send all groups. To be called before any other message: it may be about one of their records."""
        if self._open:
            groups, self._open = self._open, {}
            for group in groups.values():
                if group.numbers:
                    self._close(group)

    def _close(self, group: _Group[Header]) -> None:
        count = len(group.numbers)
        padding = (0,) if count & 1 else ()
        head: list[Buffer] = [_HEAD.pack(group.entry.key, count)]
        head.append(struct.pack(f"<{count + len(padding)}I", *group.numbers, *padding))
        if group.times:
            head.append(struct.pack(f"<{count}Q", *group.times))
        self._emit(self._kind, 0, group.count, head + group.parts)


def read_group(
    unpacker: Unpacker[Header], body: memoryview, *, timed: bool
) -> tuple[Header, Sequence[int], Sequence[int], Iterator[list[Buffer]], Sequence[int]]:
    """Return header, numbers, times and data of a group, and the tokens that came with it."""
    _, tokens, at = messages.read_batch(body)
    key, count = _HEAD.unpack_from(body, at)
    entry = unpacker.entries[key]
    at += _HEAD.size
    numbers = struct.unpack_from(f"<{count}I", body, at)
    at += (count + (count & 1)) * 4
    times: Sequence[int] = ()
    if timed:
        times = struct.unpack_from(f"<{count}Q", body, at)
        at += count * 8
    return entry.header, numbers, times, _data(entry, body, at, count), tokens


def _data(entry: HeaderEntry[Header], body: memoryview, at: int, count: int) -> Iterator[list[Buffer]]:
    layout = [(begin - RECORD_SIZE, end - RECORD_SIZE) for begin, end in entry.layout]
    stride = entry.extent - RECORD_SIZE
    if len(layout) == 1:
        ((begin, end),) = layout
        for start in range(at, at + count * stride, stride) if stride else [at] * count:
            yield [body[start + begin : start + end]]
        return
    for _ in range(count):
        yield [body[at + begin : at + end] for begin, end in layout]
        at += stride
