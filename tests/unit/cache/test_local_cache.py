"""The cache in this process: exact in what it keeps, what it forgets, and how much it takes."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from doubles import samples
from nerite.cache import interface
from nerite.cache.local import LocalCache
from nerite.core import tensor as dtypes
from nerite.core.headers import response_header_bytes
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec


def header(outputs: int = 1, dimensions: int = 1) -> ResponseHeader:
    shape = tuple(range(1000, 1000 + dimensions))
    return ResponseHeader("model", "1", [TensorSpec(f"OUT{place}", dtypes.UINT8, shape) for place in range(outputs)])


def response(size: int, of: ResponseHeader) -> InferenceResponse:
    return InferenceResponse(of, [memoryview(bytearray(os.urandom(size)))])


def found(cache: LocalCache, key: bytes) -> InferenceResponse | None:
    answers: list[InferenceResponse | None] = []
    cache.lookup(key, answers.append)
    (answer,) = answers
    return answer


HEADERS = [header(dimensions=dimensions) for dimensions in (1, 2, 3)]
SIZE = 6000


class Kept(RuleBasedStateMachine):
    """Beside the cache, the simplest thing that does the same: an ordered dictionary, and everything added up."""

    @initialize()
    def empty(self) -> None:
        self.cache = LocalCache(SIZE)
        self.kept: OrderedDict[bytes, InferenceResponse] = OrderedDict()

    def takes(self) -> int:
        headers = {each.header for each in self.kept.values() if each.header is not None}
        return sum(map(interface.response_bytes, self.kept.values())) + sum(map(response_header_bytes, headers))

    @rule(key=st.binary(min_size=1, max_size=1), size=st.integers(0, SIZE), of=st.sampled_from(HEADERS))
    def insert(self, key: bytes, size: int, of: ResponseHeader) -> None:
        given = response(size, of)
        self.cache.insert(key, given)
        self.kept.pop(key, None)
        if interface.response_bytes(given) + response_header_bytes(of) <= SIZE:
            self.kept[key] = given
            while self.takes() > SIZE:
                self.kept.popitem(last=False)

    @rule(key=st.binary(min_size=1, max_size=1))
    def look(self, key: bytes) -> None:
        answer = found(self.cache, key)
        if key not in self.kept:
            assert answer is None
        else:
            self.kept.move_to_end(key)
            assert answer is not None
            assert (answer.header, list(answer.data)) == (self.kept[key].header, [*map(bytes, self.kept[key].data)])

    @invariant()
    def the_budget_is_kept_to_the_byte(self) -> None:
        assert self.cache.used == self.takes() <= SIZE
        assert len(self.cache) == len(self.kept)


TestKept = Kept.TestCase


def test_bytes_are_copied_when_they_are_kept_and_never_again() -> None:
    cache = LocalCache(10_000)
    memory = bytearray(b"1234")
    cache.insert(b"k", InferenceResponse(HEADERS[0], [memoryview(memory)]))
    memory[:] = b"5678"
    memory.append(0)  # and nobody holds it any more
    one, other = found(cache, b"k"), found(cache, b"k")
    assert one is not None and other is not None
    assert one.data[0] == b"1234"
    assert one.data[0] is other.data[0]


def test_what_is_larger_than_the_cache_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cache = LocalCache(2000)
    cache.insert(b"\1\2", response(4, HEADERS[0]))
    for _ in range(3):
        cache.insert(b"\3\4", response(3000, HEADERS[0]))
    needed = response_header_bytes(HEADERS[0]) + interface.ENTRY + interface.PART + 3000
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to insert key [0304] into response cache: Requested byte_size: "
        f"{needed} is greater than total cache size: 2000"
    ]
    assert found(cache, b"\1\2") is not None, "and nothing had to leave for it"


def test_metrics() -> None:
    cache = LocalCache(2000)
    found(cache, b"a")
    for key in (b"a", b"b", b"c", b"d"):
        cache.insert(key, response(100, HEADERS[0]))
    found(cache, b"d")
    values = {name: values[""] for name, values in samples(cache.write_metrics).items()}
    assert values["nv_cache_util"] == cache.used / 2000
    counts = ("num_entries", "num_hits", "num_misses", "num_lookups", "num_evictions")
    assert [values[f"nv_cache_{name}"] for name in counts] == [2, 1, 1, 2, 2]


@pytest.mark.parametrize("own_headers", [False, True])
@pytest.mark.parametrize(("outputs", "dimensions"), [(0, 0), (1, 1), (3, 4)])
def test_what_is_counted_is_what_memory_is_taken(outputs: int, dimensions: int, own_headers: bool) -> None:
    common = header(outputs, dimensions)
    gc.collect()
    tracemalloc.start()
    try:
        cache = LocalCache(1 << 30)
        for number in range(1000):
            of = header(outputs, dimensions) if own_headers else common
            parts = [os.urandom(100) for _ in range(outputs)]
            cache.insert(number.to_bytes(32, "little"), InferenceResponse(of, parts))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= cache.used < 2.5 * taken
