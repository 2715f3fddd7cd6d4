"""The codec between server and worker, piece by piece. What crosses as a whole is in ``test_messages_cross``."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core import errors
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.headers import header_to_json, request_header_from_json, response_header_from_json
from nerite.core.memory import memory_file
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.core.text import bounded
from nerite.workers.child.fused import FusedRun, runs_from_bytes, runs_to_bytes
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases


def cut(frames: messages.Frames, stream: bytes, sizes: list[int]) -> list[tuple[int, int, memoryview]]:
    """Feed ``stream`` in pieces of these sizes, over and over. Bodies are views on what ``frames`` owns."""
    found = []
    at = turn = 0
    while at < len(stream):
        space = frames.space()
        assert len(space) > 0
        size = min(sizes[turn % len(sizes)], len(space), len(stream) - at)
        turn += 1
        space[:size] = stream[at : at + size]
        at += size
        found += list(frames.received(size))
    return found


FRAME_SIZES = st.sampled_from((0, 1, 7, 8, 9, 100, 4080, 4096, 9000))
FRAMES = st.tuples(st.integers(0, 65535), st.integers(0, 65535), FRAME_SIZES)


@settings(max_examples=100)
@given(st.lists(FRAMES, max_size=12), st.lists(st.sampled_from((1, 2, 7, 8, 100, 4096, 10**6)), min_size=1, max_size=4))
def test_messages_survive_any_cut(described: list[tuple[int, int, int]], sizes: list[int]) -> None:
    sent = [(kind, count, bytes([number + 1]) * size) for number, (kind, count, size) in enumerate(described)]
    stream = b"".join(messages.frame(kind, body, count) for kind, count, body in sent)
    assert len(stream) % 8 == 0
    received = cut(messages.Frames(), stream, sizes)
    # Looked at after everything has arrived: no buffer is used twice.
    assert [(kind, count, bytes(body).rstrip(b"\0")) for kind, count, body in received] == sent
    assert all(len(body) % 8 == 0 and not body.readonly for _, _, body in received)


@pytest.mark.parametrize("size", [4087, 4088, 4089, 8192, 100_000, 1_000_000])
def test_a_message_larger_than_any_buffer(size: int) -> None:
    stream = messages.frame(3, b"x" * size) + messages.frame(4, b"y")
    (_, _, large), (_, _, small) = cut(messages.Frames(), stream, [65536])
    assert bytes(large).rstrip(b"\0") == b"x" * size
    assert bytes(small).rstrip(b"\0") == b"y"


def test_a_busy_stream_gets_more_room() -> None:
    frames = messages.Frames()
    room = len(frames.space())
    stream = messages.frame(3, bytes(1000)) * 1000
    cut(frames, stream, [10**6])
    assert room < len(frames.space()) <= 65536


UTF8 = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | UTF8,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UTF8, inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_json(value: object) -> None:
    ((kind, count, body),) = cut(messages.Frames(), messages.json_frame(messages.LOAD, value), [10**6])
    assert (kind, count) == (messages.LOAD, 0)
    assert messages.read_json(body) == value


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100))
def test_tokens(tokens: list[int]) -> None:
    ((kind, count, body),) = cut(messages.Frames(), messages.tokens_frame(tokens), [10**6])
    assert kind == messages.RETURN
    assert list(messages.read_tokens(body, count)) == tokens


def parsed(message: bytes) -> tuple[int, int, memoryview]:
    (only,) = cut(messages.Frames(), message, [10**6])
    return only


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [0xFFFFFFFF, 5, 6]])
@pytest.mark.parametrize("failed", [False, True])
def test_a_batch_without_records(tokens: list[int], failed: bool) -> None:
    timings = ExecutionTimes()
    timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = 1, 2**40, 3, 2**63
    timings.failed = failed
    kind, count, body = parsed(messages.batch_message(messages.RESULT, 0xFFFFFFFF, 7, tokens, timings, []))
    assert (kind, count) == (messages.RESULT, 7)
    batch, returned, at = messages.read_batch(body)
    assert (batch, list(returned)) == (0xFFFFFFFF, tokens)
    read, end = messages.read_timings(body, at)
    assert (read.started_ns, read.inputs_ready_ns, read.computed_ns, read.ended_ns) == (1, 2**40, 3, 2**63)
    assert read.failed is failed
    assert end == len(body)


@pytest.mark.parametrize("kind", errors.BY_CODE.values())
@pytest.mark.parametrize("text", ["", "plain", "é \u2603 \0 \n \\", "x" * 100_000])
def test_an_error_crosses_with_kind_and_text(kind: type[errors.NeriteError], text: str) -> None:
    parts: list[Any] = []
    codec.error_record(kind(text), parts)
    codec.error_record(errors.Internal("the next one"), parts)
    _, _, body = parsed(messages.batch_message(messages.RESULT, 1, 2, [], None, parts))
    unpacker = codec.response_unpacker(BufferLeases(), BufferBorrower())
    _, _, at = messages.read_batch(body)
    error, name, data, at = unpacker.record(body, at)
    assert (type(error), name, data) == (kind, "", [])
    assert isinstance(error, errors.NeriteError)
    assert error.message == bounded(text)
    following, _, _, end = unpacker.record(body, at)
    assert str(following) == "the next one"
    assert end == len(body)


def test_an_error_of_an_unknown_code_is_internal() -> None:
    _, _, body = parsed(messages.json_frame(messages.FAILED, {"code": "ODD", "message": "why"}))
    error = messages.read_error(body)
    assert (type(error), error.message) == (errors.Internal, "why")
    _, _, body = parsed(messages.json_frame(messages.FAILED, messages.error_json(errors.NotFound("x"))))
    assert type(messages.read_error(body)) is errors.NotFound


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
PARAMETERS = st.dictionaries(
    TEXTS, st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXTS, max_size=4
)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        TEXTS,
        st.sampled_from(dtypes.ALL),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=4,
)


@given(st.data())
def test_a_request_header_crosses(data: st.DataObject) -> None:
    header = RequestHeader(
        data.draw(TEXTS),
        data.draw(TEXTS),
        data.draw(SPECS),
        [RequestedOutput(name) for name in data.draw(st.lists(TEXTS, max_size=3))],
        parameters=data.draw(PARAMETERS),
        priority=data.draw(st.integers(0, 2**64 - 1)),
        timeout_us=data.draw(st.integers(0, 2**63)),
        sequence_id=data.draw(st.integers(0, 2**64 - 1) | TEXTS),
        sequence_start=data.draw(st.booleans()),
        sequence_end=data.draw(st.booleans()),
    )
    header.batch_size = data.draw(st.integers(0, 100))
    _, _, body = parsed(messages.json_frame(messages.LOAD, header_to_json(header)))
    read = request_header_from_json(messages.read_json(body))
    assert read.identity() == header.identity()
    assert read.batch_size == header.batch_size
    assert all(one.datatype is other.datatype for one, other in zip(read.inputs, header.inputs, strict=True))


@given(TEXTS, TEXTS, SPECS, PARAMETERS)
def test_a_response_header_crosses(
    model: str, version: str, specs: list[TensorSpec], parameters: dict[str, Any]
) -> None:
    header = ResponseHeader(model, version, specs, parameters)
    _, _, body = parsed(messages.json_frame(messages.LOAD, header_to_json(header)))
    read = response_header_from_json(messages.read_json(body))
    assert (read.model_name, read.model_version, read.outputs) == (model, version, tuple(specs))
    assert {key: (type(value), value) for key, value in read.parameters.items()} == {
        key: (type(value), value) for key, value in parameters.items()
    }


def test_a_parameter_that_is_not_a_number_crosses() -> None:
    header = ResponseHeader("m", "1", [], {"a": math.nan, "b": math.inf})
    _, _, body = parsed(messages.json_frame(messages.LOAD, header_to_json(header)))
    read = response_header_from_json(messages.read_json(body))
    assert str(read.parameters) == "{'a': nan, 'b': inf}"


def small(name: str = "m") -> RequestHeader:
    return RequestHeader(name, "1", [TensorSpec("IN", dtypes.FP32, (4,))])


def budget() -> ByteBudget:
    return ByteBudget("test", 1 << 20, 1 << 17)


def requests() -> codec.Packer[RequestHeader]:
    return codec.Packer(Arena(), BufferLeases(), BufferBorrower(), budget())


def packed(packer: codec.Packer[RequestHeader], *headers: RequestHeader) -> bytes:
    parts: list[Any] = []
    packer.begin()
    for header in headers:
        packer.record(header, "", [bytes(16)], parts)
    return b"".join(parts)


def models(unpacker: codec.Unpacker[RequestHeader], body: bytes) -> list[str]:
    """Return the models that requests are for."""
    at, names = 0, []
    while at < len(body):
        read, _, data, at = unpacker.record(memoryview(body), at)
        assert isinstance(read, RequestHeader) and [len(each) for each in data] == [16]
        names.append(read.model_name)
    return names


def test_a_header_crosses_once() -> None:
    packer, unpacker = requests(), codec.request_unpacker(BufferLeases(), BufferBorrower())
    header, other = small("a"), small("b")
    first, second, third = (packed(packer, *each) for each in ([header], [header, other], [other, header]))
    assert len(first) > 100 and len(second) > 100 and len(third) == 2 * (8 + 16)
    assert [models(unpacker, each) for each in (first, second, third)] == [["a"], ["a", "b"], ["b", "a"]]


def test_a_message_that_is_withdrawn_leaves_nothing() -> None:
    """A header is introduced by what is sent; the tensors of a record that failed are not lent."""
    buffer_leases = BufferLeases()
    packer: codec.Packer[RequestHeader] = codec.Packer(Arena(), buffer_leases, BufferBorrower(), budget())
    unpacker = codec.request_unpacker(BufferLeases(), BufferBorrower())
    header, large = small("a"), RequestHeader("l", "", [TensorSpec("IN", dtypes.UINT8, (codec.INLINE_LIMIT,))])
    parts: list[Any] = []
    packer.begin()
    packer.record(header, "", [bytes(16)], parts)
    packer.record(large, "", [bytes(codec.INLINE_LIMIT)], parts)
    with pytest.raises(UnicodeEncodeError):
        packer.record(header, "\udcff", [bytes(16)], parts)
    packer.withdraw()
    assert not buffer_leases.leased
    assert models(unpacker, packed(packer, header)) == ["a"]
    packer.begin()
    packer.record(large, "", [bytes(codec.INLINE_LIMIT)], parts)
    assert [*buffer_leases.leased] == [1]


def test_a_header_that_cannot_be_encoded_is_not_remembered() -> None:
    packer, unpacker = requests(), codec.request_unpacker(BufferLeases(), BufferBorrower())
    header = RequestHeader("m", "1", [TensorSpec("IN", dtypes.FP32, (4,))], parameters={"a": b"bytes"})  # type: ignore[dict-item]
    for _ in range(2):
        with pytest.raises(TypeError):
            packed(packer, header)
        packer.withdraw()
    assert models(unpacker, packed(packer, small("after"))) == ["after"]


def test_a_small_request_costs_sixteen_bytes() -> None:
    """Eight for the record; eight more is what the frame of a batch of one comes to, besides its head."""
    packer, header = requests(), small()
    packed(packer, header)
    parts: list[Any] = []
    packer.record(header, "", [bytes(16)], parts)
    assert sum(map(len, parts)) == 8 + 16
    message = messages.batch_message(messages.EXECUTE, 1, 1, [], None, parts)
    assert len(message) == 8 + 8 + 8 + 16


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["", "id"])
@pytest.mark.parametrize("size", [0, 8, 24, codec.INLINE_LIMIT])
def test_a_tensor_has_the_size_that_its_header_says(size: int, name: str, known: bool) -> None:
    """What follows in the message would be read from the wrong place."""
    packer, unpacker = requests(), codec.request_unpacker(BufferLeases(), BufferBorrower())
    if known:
        assert models(unpacker, packed(packer, small("a"))) == ["a"]
    header = next(iter(packer.entries), small("a"))
    packer.begin()
    with pytest.raises(
        errors.Internal, match=rf"^tensor 'IN' has {size} bytes, but FP32 \[4\] takes 16: its array was "
    ):
        packer.record(header, name, [bytes(size)], [])
    packer.withdraw()
    assert models(unpacker, packed(packer, header)) == ["a"]


def test_a_response_of_the_wrong_size_is_an_error_and_no_incident(caplog: pytest.LogCaptureFixture) -> None:
    packer: codec.Packer[ResponseHeader] = codec.Packer(Arena(), BufferLeases(), BufferBorrower(), budget())
    header = ResponseHeader("m", "1", [TensorSpec("OUT", dtypes.INT8, (4,)), TensorSpec("LAST", dtypes.INT8, (1,))])
    response = InferenceResponse(header, [bytes(4), bytes(2)])
    body = b"".join(codec.sendable_response(packer, response))
    error, *_ = codec.response_unpacker(BufferLeases(), BufferBorrower()).record(memoryview(body), 0)
    assert isinstance(error, errors.Internal) and error.message.startswith(
        "tensor 'LAST' has 2 bytes, but INT8 [1] takes 1"
    )
    assert not caplog.records


@pytest.mark.parametrize("size", [1, 200, 65535, 65536, 300_000])
def test_an_id_of_any_length(size: int) -> None:
    packer, unpacker = requests(), codec.request_unpacker(BufferLeases(), BufferBorrower())
    parts: list[Any] = []
    name = "é" * size
    packer.record(small("m"), name, [b"0123456789abcdef"], parts)
    read, id, data, end = unpacker.record(memoryview(b"".join(parts)), 0)
    assert isinstance(read, RequestHeader) and read.model_name == "m"
    assert id == name
    assert [bytes(each) for each in data] == [b"0123456789abcdef"]
    assert end == sum(map(len, parts))


GUEST, LENT = 70_000, 3


def sent(tensor: memoryview, borrower: BufferBorrower) -> tuple[int, bool]:
    """Return the segment that a tensor is said to lie in, and whether that is the receiver's own."""
    arena = Arena()
    packer: codec.Packer[RequestHeader] = codec.Packer(
        arena, BufferLeases(), borrower, budget(), lambda _view, _address: (GUEST, 0)
    )
    header = RequestHeader("m", "1", [TensorSpec("IN", dtypes.UINT8, (len(tensor),))])
    parts: list[Any] = []
    packer.record(header, "", [tensor], [])
    packer.record(header, "", [tensor], parts)
    assert not arena.segments, "it was copied"
    size, _, segment, _ = struct.unpack_from("<QQII", b"".join(parts), 8)
    assert size == len(tensor)
    return (segment & 0x7FFFFFFF) - 1, bool(segment & 0x80000000)


def test_a_tensor_in_memory_of_others_is_sent_as_its_place() -> None:
    """What is for reading only never goes as a part of memory that its receiver may write."""
    receiver = BufferBorrower()
    descriptor = memory_file(codec.INLINE_LIMIT)
    receiver.add(LENT, descriptor, codec.INLINE_LIMIT)
    os.close(descriptor)
    view = receiver.view(LENT, 0, codec.INLINE_LIMIT, token=9)
    assert sent(view, BufferBorrower()) == (GUEST, False)
    assert sent(view, receiver) == (LENT, True)
    assert sent(view.toreadonly(), receiver) == (GUEST, False)


RUN = st.builds(
    FusedRun,
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.builds(ExecutionTimes),
    st.lists(st.integers(0, 65535), max_size=9).map(tuple),
)


@given(st.lists(RUN, max_size=4))
def test_what_became_of_a_batch_survives(runs: list[FusedRun]) -> None:
    part = runs_to_bytes(runs)
    assert len(part) % 8 == 0
    read = list(runs_from_bytes(memoryview(part)))
    assert [(run.number, run.rows, run.requests) for run in read] == [(r.number, r.rows, r.requests) for r in runs]
    assert [run.timings.started_ns for run in read] == [run.timings.started_ns for run in runs]
