"""Groups of small records: whatever is sent arrives with its number, among records of every other kind."""

from __future__ import annotations

import re
from inspect import getsource
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.request import RequestHeader
from nerite.core.tensor import TensorSpec
from nerite.fronts import messages as kinds
from nerite.fronts.groups import GroupWriter, read_group
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases


def header(sizes: tuple[int, ...], model: str = "m") -> RequestHeader:
    return RequestHeader(model, "", [TensorSpec(f"I{at}", dtypes.UINT8, (size,)) for at, size in enumerate(sizes)])


class Line:
    """A packer with its groups, and the unpacker at the other end."""

    def __init__(self, budget: int = 1 << 20) -> None:
        leases, borrower = BufferLeases(), BufferBorrower()
        self.packer: codec.Packer[RequestHeader] = codec.Packer(Arena(), leases, borrower, ByteBudget("test", budget))
        self.groups = GroupWriter(self.packer, kinds.CALLS, self._emit)
        self.unpacker = codec.request_unpacker(leases, borrower)
        self.sent = bytearray()
        self.messages = 0

    def _emit(self, kind: int, number: int, count: int, records: list[Any]) -> None:
        self.messages += 1
        self.sent += messages.batch_message(kind, number, count, (7, 8, 9), None, records)

    def call(self, number: int, of: RequestHeader, data: list[bytes], time: int = 0) -> bool:
        """Send a call, in a group if possible; return whether it was."""
        if self.groups.add(of, number, data, 1, time):
            return True
        parts: list[Any] = []
        self.packer.begin()
        self.packer.record(of, "", data, parts)
        self.groups.close()
        self._emit(kinds.CALL, number, 0, parts)
        return False

    def received(self) -> list[tuple[int, RequestHeader, list[bytes], int | None]]:
        """Return number, header, data and, of records in groups, time of all that was sent."""
        self.groups.close()
        found: list[tuple[int, RequestHeader, list[bytes], int | None]] = []
        frames = messages.Frames()
        at = 0
        while at < len(self.sent):
            space = frames.space()
            size = min(len(space), len(self.sent) - at)
            space[:size] = self.sent[at : at + size]
            at += size
            for kind, count, body in frames.received(size):
                if kind == kinds.CALLS:
                    assert count == 1
                    head, numbers, times, records, tokens = read_group(self.unpacker, body, timed=True)
                    assert tuple(tokens) == (7, 8, 9)
                    for number, time, data in zip(numbers, times, records, strict=True):
                        found.append((number, head, [bytes(each) for each in data], time))
                else:
                    number, _, place = messages.read_batch(body)
                    read, _, data, _ = self.unpacker.record(body, place)
                    assert isinstance(read, RequestHeader)
                    found.append((number, read, [bytes(each) for each in data], None))
        self.sent.clear()
        return found


def test_a_header_is_sent_once_and_then_in_groups() -> None:
    line, of = Line(), header((3,))
    grouped = [line.call(number, of, [bytes([number] * 3)], 100 + number) for number in range(5)]
    assert grouped == [False, True, True, True, True]
    assert [(number, data, time) for number, _, data, time in line.received()] == [
        (number, [bytes([number] * 3)], 100 + number if number else None) for number in range(5)
    ]
    assert line.messages == 2


@pytest.mark.parametrize("sizes", [(), (0,), (8,), (1, 9, 16), (0, 5)])
@pytest.mark.parametrize("count", [1, 2, 3, 255, 256, 257])
def test_sizes_and_counts(sizes: tuple[int, ...], count: int) -> None:
    line, of = Line(), header(sizes)
    line.call(0, of, [bytes(size) for size in sizes])
    line.received()
    for number in range(1, count + 1):
        assert line.call(number, of, [bytes([number % 256] * size) for size in sizes], number)
    found = line.received()
    assert [number for number, *_ in found] == [time for *_, time in found] == list(range(1, count + 1))
    for number, _, data, _ in found:
        assert data == [bytes([number % 256] * size) for size in sizes]


def test_what_cannot_be_part_of_a_group() -> None:
    line = Line()
    for of, data in (
        (header((codec.INLINE_LIMIT,)), bytes(codec.INLINE_LIMIT)),
        (RequestHeader("m", "", [TensorSpec("T", dtypes.BYTES, (1,))]), b"\1\0\0\0x"),
    ):
        line.packer.begin()
        line.packer.record(of, "", [data], [])
        assert not line.groups.add(of, 1, [data], 1, 0)
    line = Line()
    of = header((4,))
    line.call(3, of, [b"1234"])
    assert line.call(4, of, [b"1234"])
    assert not line.groups.add(of, 5, [b"12345"], 1, 0)  # the record that follows reports the wrong size
    assert [number for number, *_ in line.received()] == [3, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 255)), max_size=60),
    st.sampled_from([8 * 1024, 16 * 1024, 1 << 20]),
)
def test_all_arrive_while_headers_are_evicted(calls: list[tuple[int, int]], budget: int) -> None:
    line = Line(budget)
    headers = [header((1 + which, 2), f"model {which}") for which in range(6)]
    for number, (which, value) in enumerate(calls):
        line.call(number, headers[which], [bytes([value] * (1 + which)), b"xy"], number)
    found = {number: (head.model_name, data) for number, head, data, _ in line.received()}
    assert found == {
        number: (f"model {which}", [bytes([value] * (1 + which)), b"xy"]) for number, (which, value) in enumerate(calls)
    }


def test_each_kind_of_message_has_a_number_of_its_own() -> None:
    numbers = [int(number) for number in re.findall(r"^[A-Z_]+: Final = (\d\d)\b", getsource(kinds), re.MULTILINE)]
    assert len(numbers) > 20
    assert len(set(numbers)) == len(numbers)
