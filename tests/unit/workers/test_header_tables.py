"""The headers that a packer has introduced and those that its unpacker keeps: the same ones, within a budget."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ENTRY, ByteBudget
from nerite.core.headers import header_to_json
from nerite.core.request import RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.workers.ipc import codec
from nerite.workers.ipc.codec import HeaderEntry, Packer, Unpacker
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases

DATA = bytes(16)
COUNT = 200


def header(number: int, length: int = 0) -> RequestHeader:
    return RequestHeader(f"m{number}", "1", [TensorSpec("IN", dtypes.FP32, (4,))], parameters={"text": "x" * length})


POOL = [header(number, length) for number, length in enumerate((0, 0, 0, 1000, 1000, 3000, 8000, 100_000))]
SMALL = ENTRY + HeaderEntry(POOL[0]).footprint


class Pair:
    """A sender and its receiver."""

    def __init__(self, budget: ByteBudget) -> None:
        self.packer: Packer[RequestHeader] = Packer(Arena(), BufferLeases(), BufferBorrower(), budget)
        self.unpacker = codec.request_unpacker(BufferLeases(), BufferBorrower())

    def send(self, headers: list[RequestHeader]) -> bool:
        """Have a message cross; return whether it introduced a header."""
        parts = self.pack(headers)
        body, at = memoryview(b"".join(parts)), 0
        for each in headers:
            read, _, data, at = self.unpacker.record(body, at)
            assert isinstance(read, RequestHeader) and header_to_json(read) == header_to_json(each)
            assert [bytes(tensor) for tensor in data] == [DATA]
        assert at == len(body)
        return len(body) > len(headers) * (8 + len(DATA))

    def pack(self, headers: list[RequestHeader]) -> list[Any]:
        parts: list[Any] = []
        self.packer.begin()
        for each in headers:
            self.packer.record(each, "", [DATA], parts)
        return parts

    @property
    def sent(self) -> dict[int, Any]:
        return {entry.key: header_to_json(entry.header) for entry in self.packer.entries.values()}

    @property
    def kept(self) -> dict[int, Any]:
        return {key: header_to_json(entry.header) for key, entry in self.unpacker.entries.items()}


class Crossing(RuleBasedStateMachine):
    """Two packers share a budget, as those of a server do; some of their messages are withdrawn."""

    @initialize(
        limit=st.sampled_from((0, SMALL, 2 * SMALL, 3 * SMALL, 10 * SMALL)),
        largest=st.sampled_from((SMALL - 1, SMALL, 3 * SMALL, 100 * SMALL)),
    )
    def begin(self, limit: int, largest: int) -> None:
        self.budget = ByteBudget("test", limit, largest)
        self.pairs = [Pair(self.budget), Pair(self.budget)]

    @rule(which=st.integers(0, 1), headers=st.lists(st.sampled_from(POOL), max_size=4))
    def send(self, which: int, headers: list[RequestHeader]) -> None:
        pair = self.pairs[which]
        if pair.send(headers):
            assert pair.kept == pair.sent

    @rule(which=st.integers(0, 1), headers=st.lists(st.sampled_from(POOL), min_size=1, max_size=4))
    def withdraw(self, which: int, headers: list[RequestHeader]) -> None:
        pair = self.pairs[which]
        pair.pack(headers)
        pair.packer.withdraw()

    @invariant()
    def what_is_remembered_has_crossed(self) -> None:
        for pair in self.pairs:
            assert pair.sent.items() <= pair.kept.items()

    @invariant()
    def each_key_is_in_one_place(self) -> None:
        for pair in self.pairs:
            table = pair.packer.table
            keys = [entry.key for entry in table.entries.values()]
            assert sorted(keys + table.free_keys) == list(range(table.key_count))

    @invariant()
    def both_sides_keep_to_the_budget(self) -> None:
        assert self.budget.used <= self.budget.limit
        for pair in self.pairs:
            size = sum(ENTRY + entry.footprint for entry in pair.unpacker.entries.values())
            assert size <= self.budget.limit
            assert pair.packer.table.key_count <= 1 + self.budget.limit // SMALL


TestCrossing = Crossing.TestCase


def test_both_tables_are_equal_after_each_message() -> None:
    pair = Pair(ByteBudget("test", 4 * SMALL))
    for number in range(100):
        pair.send([POOL[0], *(header(each) for each in range(number % 7)), POOL[number % 8]])
        assert pair.kept == pair.sent
    assert 0 < len(pair.kept) <= 4


def test_a_header_larger_than_the_budget_crosses_each_time() -> None:
    pair = Pair(ByteBudget("test", SMALL, 100 * SMALL))
    large = POOL[6]
    for _ in range(3):
        assert sum(map(len, pair.pack([large]))) > 8000
        assert pair.send([large])
    assert not (pair.sent or pair.kept)


def test_what_other_packers_evicted_is_introduced_again() -> None:
    budget = ByteBudget("test", 2 * SMALL)
    one, other = Pair(budget), Pair(budget)
    assert one.send([POOL[0]]) and not one.send([POOL[0]])
    assert other.send([POOL[1], POOL[2]])
    assert one.send([POOL[0]])
    assert len(one.kept) == 1


def sizes_of(make: Callable[[int], Any], unpacker: Unpacker[Any]) -> tuple[int, int]:
    """Return the bytes that each of some headers takes when it has crossed: with the sender, and with the receiver."""
    packer: Packer[Any] = Packer(Arena(), BufferLeases(), BufferBorrower(), ByteBudget("test", 1 << 30, 1 << 20))
    bodies: list[bytes] = []

    def send(numbers: range) -> None:
        for number in numbers:
            header, parts = make(number), list[Any]()
            packer.begin()
            specs = header.inputs if isinstance(header, RequestHeader) else header.outputs
            packer.record(header, "", [bytes(spec.byte_size) for spec in specs], parts)
            bodies.append(b"".join(parts))
        packer.begin()

    send(range(100))
    bodies.clear()
    gc.collect()
    tracemalloc.start()
    try:
        send(range(100, 100 + COUNT))
        gc.collect()
        bodies_size = sum(map(sys.getsizeof, bodies))
        sender = tracemalloc.get_traced_memory()[0] - bodies_size
        for body in bodies:
            unpacker.record(memoryview(body), 0)
        gc.collect()
        receiver = tracemalloc.get_traced_memory()[0] - bodies_size - sender
    finally:
        tracemalloc.stop()
    return sender // COUNT, receiver // COUNT


@pytest.mark.parametrize("tensors", [0, 1, 3, 40])
@pytest.mark.parametrize("parameters", [0, 20])
def test_what_a_header_takes_in_either_process_is_not_more_than_it_counts(tensors: int, parameters: int) -> None:
    def specs(number: int) -> list[TensorSpec]:
        return [TensorSpec(f"{place} {number}", dtypes.FP32, (0, 300 + number)) for place in range(tensors)]

    def said(number: int) -> dict[str, Any]:
        return {f"parameter {at}": f"{number} {at}" for at in range(parameters)}

    def request(number: int) -> RequestHeader:
        return RequestHeader("model", "1", specs(number), parameters=said(number))

    def response(number: int) -> ResponseHeader:
        return ResponseHeader("model", "1", specs(number), said(number))

    makers: list[tuple[Callable[[int], Any], Unpacker[Any]]] = [
        (request, codec.request_unpacker(BufferLeases(), BufferBorrower())),
        (response, codec.response_unpacker(BufferLeases(), BufferBorrower())),
    ]
    for make, unpacker in makers:
        counted = ENTRY + HeaderEntry(make(100)).footprint
        for size in sizes_of(make, unpacker):
            assert counted / 8 <= size <= counted
