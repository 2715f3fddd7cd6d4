"""Requests and answers between a server's end and a worker's end of the channel, both in this process.

Whatever is sent arrives, however the stream is cut: inline or through shared memory, outputs that are parts of inputs,
more headers than are remembered, memory that runs out. And in the end all shared memory is free again.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.headers import header_to_json
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import Reschedule, ResponseHeader
from nerite.core.tensor import TensorSpec, address_of, join_bytes
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc import shared_memory as arena_module
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases

KB = 1024
INLINE_LIMIT = codec.INLINE_LIMIT


class End:
    """One end: what it sends is in ``outgoing``; ``receive`` cuts it as it pleases."""

    def __init__(self, budget: int, headers: int = 1024 * KB) -> None:
        self.outgoing = bytearray()
        self.descriptors: deque[int] = deque()
        self.arena = Arena(budget)
        self.arena.on_segment.append(self._announce)
        self.buffer_leases = BufferLeases()
        self.borrower = BufferBorrower()
        self.packer: codec.Packer[Any] = codec.Packer(
            self.arena, self.buffer_leases, self.borrower, ByteBudget("test", headers)
        )
        self.requests = codec.request_unpacker(self.buffer_leases, self.borrower)
        self.responses = codec.response_unpacker(self.buffer_leases, self.borrower)
        self._frames = messages.Frames()

    def _announce(self, segment: Any) -> None:
        self.descriptors.append(segment.descriptor)
        self.outgoing += messages.segment_frame(self.arena.segments.index(segment), segment.size)

    def send(self, kind: int, number: int, parts: list[Any], count: int) -> None:
        timings = ExecutionTimes() if kind == messages.RESULT else None
        tokens = self.borrower.take_released()
        self.outgoing += messages.batch_message(kind, number, count, tokens, timings, parts)

    def return_tokens(self) -> None:
        self.outgoing += messages.tokens_frame(self.borrower.take_released())

    def receive(self, other: End, cuts: random.Random, handle: Callable[[int, int, memoryview], None]) -> None:
        """Take all that ``other`` has sent, in pieces of any size."""
        while other.outgoing:
            space = self._frames.space()
            size = min(cuts.choice((1, 7, 8, 100, 5000, 70_000, 10**6)), len(space), len(other.outgoing))
            space[:size] = other.outgoing[:size]
            del other.outgoing[:size]
            for kind, count, body in self._frames.received(size):
                if kind == messages.SEGMENT:
                    self.borrower.add(descriptor=other.descriptors.popleft(), **messages.read_json(body))
                elif kind == messages.RETURN:
                    for token in messages.read_tokens(body, count):
                        self.buffer_leases.returned(token)
                else:
                    handle(kind, count, body)
                del body

    def close(self) -> None:
        self.arena.close()

    def nothing_lives(self) -> bool:
        return not (self.arena.live or self.buffer_leases.leased or self.borrower.live)


SIZES = (0, 1, 7, 8, 9, 100, 5000, INLINE_LIMIT - 1, INLINE_LIMIT, INLINE_LIMIT + 1, 70_000, 200 * KB)
NUMBERS = [datatype for datatype in dtypes.ALL if datatype is not dtypes.BYTES]


def some_bytes(rng: random.Random, size: int) -> bytes:
    return np.random.default_rng(rng.getrandbits(32)).bytes(size)


def some_tensor(rng: random.Random, name: str) -> tuple[TensorSpec, bytes]:
    size = rng.choice(SIZES)
    if rng.random() < 0.2:
        elements = [some_bytes(rng, rng.randrange(5)) for _ in range(min(size, 50))]
        elements.append(some_bytes(rng, max(0, size - 500)))
        data = join_bytes(elements)
        return TensorSpec(name, dtypes.BYTES, (len(elements),)), data
    datatype = rng.choice(NUMBERS)
    count = size // datatype.size
    shape = (count // 2, 2) if count % 2 == 0 and rng.random() < 0.5 else (count,)
    return TensorSpec(name, datatype, shape), some_bytes(rng, count * datatype.size)


class Story:
    """What crosses, and what was said to cross."""

    def __init__(self, seed: int, budget: int, headers: int) -> None:
        self.rng = random.Random(seed)
        self.server = End(budget, headers)
        self.worker = End(budget, headers)
        self.headers: dict[tuple[object, ...], RequestHeader] = {}
        self.answer_headers: dict[tuple[object, ...], ResponseHeader] = {}
        self.asked: deque[list[tuple[RequestHeader, str, list[bytes]]]] = deque()
        self.answered: deque[list[tuple[ResponseHeader | NeriteError, list[bytes]]]] = deque()
        self.kept_inputs: list[tuple[Any, bytes]] = []
        self.kept_outputs: list[tuple[Any, bytes]] = []
        self.batches = 0

    def ask(self, count: int) -> None:
        """Send a batch of ``count`` requests."""
        rng = self.rng
        self.batches += 1
        parts: list[Any] = []
        expected = []
        for _ in range(count):
            header, data = self._request()
            name = rng.choice(("", "", "7", "é\u2603" * rng.randrange(100), "x" * 70_000))
            self.server.packer.record(header, name, self._placed(data), parts)
            expected.append((header, name, data))
        self.asked.append(expected)
        self.server.send(messages.EXECUTE, self.batches, parts, count)

    def _request(self) -> tuple[RequestHeader, list[bytes]]:
        tensors = [some_tensor(self.rng, f"IN{number}") for number in range(self.rng.randrange(4))]
        header = RequestHeader(
            "model",
            "",
            [spec for spec, _ in tensors],
            [RequestedOutput("OUT")] * self.rng.randrange(2),
            parameters=self.rng.choice(({}, {"a": 1}, {"a": True, "b": "é"})),
        )
        return self.headers.setdefault(header.identity(), header), [data for _, data in tensors]

    def _placed(self, data: list[bytes]) -> list[Any]:
        """Where a transport would have received the tensors: anywhere, or one behind the other in the arena."""
        if self.rng.random() < 0.5:
            return [self.rng.choice((bytes, bytearray, memoryview))(each) for each in data]
        skipped = self.rng.randrange(100)
        body = self.server.arena.allocate(max(1, skipped + sum(map(len, data))))
        if body is None:
            return list(data)
        views = []
        at = skipped
        for each in data:
            body[at : at + len(each)] = each
            views.append(body[at : at + len(each)])
            at += len(each)
        return views

    def work(self) -> None:
        """Let the worker take what has come, and answer it."""
        self.worker.receive(self.server, self.rng, self._handle_in_worker)
        if self.rng.random() < 0.3:
            self.worker.return_tokens()

    def _handle_in_worker(self, kind: int, count: int, body: memoryview) -> None:
        worker = self.worker
        assert kind == messages.EXECUTE
        number, tokens, at = messages.read_batch(body)
        for token in tokens:
            worker.buffer_leases.returned(token)
        expected = self.asked.popleft()
        assert count == len(expected)
        parts: list[Any] = []
        answers = []
        for header, name, data in expected:
            read, id, inputs, at = worker.requests.record(body, at)
            assert isinstance(read, RequestHeader)
            assert id == name
            assert header_to_json(read) == header_to_json(header)
            assert [bytes(each) for each in inputs] == data
            assert all(not memoryview(each).readonly for each in inputs)
            answers.append(self._answer(inputs, parts))
            if self.rng.random() < 0.2:
                self.kept_inputs += zip(inputs, data, strict=True)
            del inputs
        assert at == len(body)
        self.answered.append(answers)
        worker.send(messages.RESULT, number, parts, count)

    def _answer(self, inputs: list[Any], parts: list[Any]) -> tuple[ResponseHeader | NeriteError, list[bytes]]:
        """An error, new tensors, inputs handed back, or parts of inputs."""
        rng = self.rng
        if rng.random() < 0.2:
            error = InvalidArgument("é" * rng.randrange(20))
            codec.error_record(error, parts)
            return error, []
        specs: list[TensorSpec] = []
        outputs: list[Any] = []
        for number in range(rng.randrange(3)):
            if inputs and rng.random() < 0.6:
                whole = memoryview(rng.choice(inputs))
                start = rng.choice((0, 0, rng.randrange(len(whole) + 1)))
                part = whole[start : rng.choice((len(whole), rng.randrange(start, len(whole) + 1)))]
                specs.append(TensorSpec(f"OUT{number}", dtypes.UINT8, (len(part),)))
                outputs.append(part)
            else:
                spec, data = some_tensor(rng, f"OUT{number}")
                specs.append(spec)
                outputs.append(data)
        header = ResponseHeader("model", "1", specs)
        header = self.answer_headers.setdefault(tuple(specs), header)
        if rng.random() < 0.2:
            # A request that is to run again leaves states, which look like an answer.
            codec.response_record(self.worker.packer, Reschedule(header, outputs), parts)
            return header, [bytes(each) for each in outputs]
        self.worker.packer.record(header, "", outputs, parts)
        return header, [bytes(each) for each in outputs]

    def collect(self) -> None:
        """Let the server take the answers that have come."""
        self.server.receive(self.worker, self.rng, self._handle_in_server)

    def _handle_in_server(self, kind: int, count: int, body: memoryview) -> None:
        server = self.server
        assert kind == messages.RESULT
        _, tokens, at = messages.read_batch(body)
        _, at = messages.read_timings(body, at)
        for header, data in self.answered.popleft():
            read, _, outputs, at = server.responses.record(body, at)
            if read is Reschedule:
                read, _, outputs, at = server.responses.record(body, at)
            if isinstance(header, NeriteError):
                assert (type(read), str(read)) == (type(header), str(header))
            else:
                assert header_to_json(read) == header_to_json(header)
                assert [bytes(each) for each in outputs] == data
            if self.rng.random() < 0.3:
                self.kept_outputs += zip(outputs, data, strict=True)
            del outputs
        assert at == len(body)
        for token in tokens:
            server.buffer_leases.returned(token)

    def forget(self, kept: list[tuple[Any, bytes]]) -> None:
        """Check what was kept, and let go of some of it."""
        assert all(bytes(view) == data for view, data in kept)
        self.rng.shuffle(kept)
        del kept[: self.rng.randrange(len(kept) + 1)]

    def end(self) -> None:
        """Answer everything, let go of everything, and say so."""
        self.work()
        self.collect()
        for kept in (self.kept_inputs, self.kept_outputs):
            assert all(bytes(view) == data for view, data in kept)
            kept.clear()
        gc.collect(0)
        self.worker.return_tokens()
        self.server.return_tokens()
        self.work()
        self.collect()
        assert not (self.asked or self.answered)
        assert self.server.nothing_lives()
        assert self.worker.nothing_lives()


@contextmanager
def small_world() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "SEGMENT_SIZE", 1024 * KB)
        yield


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 4)),
        st.tuples(st.just("ask"), st.integers(1, 2)),
        st.sampled_from([("work", 0), ("collect", 0), ("forget inputs", 0), ("forget outputs", 0)]),
        st.sampled_from([("work", 0), ("collect", 0)]),
    ),
    max_size=14,
)


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.sampled_from((0, 1024 * KB, 3 * 1024 * KB, 64 * 1024 * KB)),
    st.sampled_from((3 * KB, 20 * KB, 4096 * KB)),
    STEPS,
)
def test_everything_crosses_and_nothing_is_left(
    seed: int, budget: int, headers: int, steps: list[tuple[str, int]]
) -> None:
    with small_world():
        story = Story(seed, budget, headers)
        try:
            for step, argument in steps:
                if step == "ask":
                    story.ask(argument)
                elif step == "work":
                    story.work()
                elif step == "collect":
                    story.collect()
                else:
                    story.forget(story.kept_inputs if step == "forget inputs" else story.kept_outputs)
            story.end()
        finally:
            story.server.close()
            story.worker.close()


def pair() -> tuple[End, End]:
    return End(64 * 1024 * KB), End(64 * 1024 * KB)


def test_a_large_tensor_is_not_in_the_stream() -> None:
    server, worker = pair()
    header = RequestHeader("m", "", [TensorSpec("IN", dtypes.UINT8, (INLINE_LIMIT,))])
    parts: list[Any] = []
    server.packer.record(header, "", [bytes(INLINE_LIMIT)], parts)
    server.send(messages.EXECUTE, 1, parts, 1)
    assert len(server.outgoing) < 1000
    inputs: list[Any] = []

    def handle(kind: int, count: int, body: memoryview) -> None:
        inputs.extend(worker.requests.record(body, messages.read_batch(body)[2])[2])

    worker.receive(server, random.Random(0), handle)
    assert [bytes(each) for each in inputs] == [bytes(INLINE_LIMIT)]
    server.close()


def test_a_tensor_in_the_arena_is_not_copied() -> None:
    server, _ = pair()
    body = server.arena.allocate(INLINE_LIMIT + 64)
    assert body is not None
    header = RequestHeader("m", "", [TensorSpec("IN", dtypes.UINT8, (INLINE_LIMIT,))])
    server.packer.record(header, "", [body[64:]], [])
    (lent, offset) = server.buffer_leases.leased[1]
    assert (server.arena.place(address_of(lent)), offset) == ((0, 64), 64)
    server.close()


def test_what_the_worker_hands_back_does_not_enter_its_arena() -> None:
    server, worker = pair()
    view = server.arena.allocate(100 * KB)
    assert view is not None
    worker.borrower.add(0, server.descriptors.popleft(), server.arena.segments[0].size)
    token = server.buffer_leases.lend(view, 0)
    borrowed = worker.borrower.view(0, 0, 100 * KB, token)
    header = ResponseHeader("m", "1", [TensorSpec("OUT", dtypes.UINT8, (50 * KB,))])
    parts: list[Any] = []
    view[10 * KB] = 0xAA
    worker.packer.record(header, "", [borrowed[10 * KB : 60 * KB]], parts)
    assert worker.arena.segments == []
    del borrowed
    _, _, (output,), _ = server.responses.record(memoryview(b"".join(parts)), 0)
    assert (output[0], len(output)) == (0xAA, 50 * KB)
    assert server.arena.place(address_of(memoryview(output))) == (0, 10 * KB)
    for released in worker.borrower.take_released():
        server.buffer_leases.returned(released)
    del view
    assert not server.buffer_leases.leased
    assert server.arena.live  # the output keeps it
    del output
    assert not server.arena.live
    server.close()


def test_a_state_goes_back_to_the_worker_as_it_lies() -> None:
    server, worker = pair()
    state = worker.arena.allocate(100 * KB)
    assert state is not None
    server.borrower.add(0, worker.descriptors.popleft(), worker.arena.segments[0].size)
    left = ResponseHeader("m", "1", [TensorSpec("AFTER", dtypes.UINT8, (100 * KB,))])
    parts: list[Any] = []
    codec.response_record(worker.packer, Reschedule(left, [state]), parts)
    again, _, _, at = server.responses.record(memoryview(b"".join(parts)), 0)
    assert again is Reschedule
    _, _, (kept,), _ = server.responses.record(memoryview(b"".join(parts)), at)
    asked = RequestHeader("m", "", [TensorSpec("BEFORE", dtypes.UINT8, (100 * KB,))])
    parts.clear()
    server.packer.record(asked, "", [kept], parts)
    assert server.arena.segments == []
    _, _, (found,), _ = worker.requests.record(memoryview(b"".join(parts)), 0)
    assert worker.arena.place(address_of(memoryview(found))) == worker.arena.place(address_of(state))
    server.close()
    worker.close()
