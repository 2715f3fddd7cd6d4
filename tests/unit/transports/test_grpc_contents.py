"""Typed contents, against what protobuf itself reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.grpc import infer_request
from nerite.transports.grpc.wire import MAX_FIELDS, MalformedMessage
from nerite.wire.fields import nested_field, varint
from nerite.wire.grpc_service import InferTensorContents

NUMBERS = {field.name: field.number for field in InferTensorContents.DESCRIPTOR.fields}
INTEGERS = [name for name, field in infer_request.CONTENTS.items() if "int" in field or name == "BOOL"]
NOTHING: list[int] = []


def read(datatype: str, *messages: bytes, aside: bool = False, taken: list[int] | None = None) -> bytes:
    spec = TensorSpec("IN", dtypes.BY_NAME[datatype], (1,))
    told = [] if taken is None else taken
    views = [memoryview(bytearray(message)) for message in messages]
    return bytes(infer_request.read_contents(spec, views, "m", told.append, aside=aside))


def expected(datatype: str, serialized: bytes) -> bytes:
    """The same, by way of protobuf's own parser."""
    values = getattr(InferTensorContents.FromString(serialized), infer_request.CONTENTS[datatype])
    if datatype == "BYTES":
        return join_bytes(values)
    field = infer_request.CONTENTS[datatype].partition("_")[0].replace("fp", "float")
    return np.array(list(values), field).astype(dtypes.BY_NAME[datatype].numpy).tobytes()


ENCODED = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=80)


@given(st.sampled_from(INTEGERS), ENCODED, st.integers(0, 80))
def test_numbers_of_any_length(datatype: str, values: list[int], cut: int) -> None:
    """Whatever is encoded, and also where it does not fit the type, packed in one piece or in two, or not packed."""
    number = NUMBERS[infer_request.CONTENTS[datatype]]
    raw = [varint(value) for value in values]
    packed = nested_field(number, b"".join(raw))
    halves = nested_field(number, b"".join(raw[:cut])) + nested_field(number, b"".join(raw[cut:]))
    single = b"".join(varint(number << 3) + each for each in raw)
    wanted = expected(datatype, packed)
    for form in (packed, halves, single, halves[: len(nested_field(number, b"".join(raw[:cut])))] + single):
        assert read(datatype, form) == expected(datatype, form)
    assert read(datatype, packed) == wanted == read(datatype, single)
    assert (
        read(datatype, nested_field(number, b"".join(raw[:cut])), nested_field(number, b"".join(raw[cut:]))) == wanted
    )


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 10])
def test_numbers_of_several_pieces(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_request, "PIECE", 1000)
    rng = np.random.default_rng(longest)
    values = [int(value) for value in rng.integers(0, min(2 ** (7 * longest), 2**64) - 1, 5000, np.uint64)]
    data = InferTensorContents(uint64_contents=values).SerializeToString()
    taken: list[int] = []
    assert read("UINT64", data, taken=taken) == np.array(values, np.uint64).tobytes()
    assert taken == [8 * 5000]


@given(st.lists(st.floats(width=32), max_size=20), st.integers(0, 20))
def test_floats(values: list[float], cut: int) -> None:
    whole = InferTensorContents(fp32_contents=values).SerializeToString()
    parts = [InferTensorContents(fp32_contents=part).SerializeToString() for part in (values[:cut], values[cut:])]
    wanted = np.array(values, np.float32).tobytes()
    assert read("FP32", whole) == read("FP32", b"".join(parts)) == read("FP32", *parts) == wanted
    assert read("FP32", b"".join(b"\x35" + np.float32(value).tobytes() for value in values)) == wanted
    doubles = InferTensorContents(fp64_contents=values).SerializeToString()
    assert read("FP64", doubles) == np.array(values, np.float64).tobytes()


def test_floats_are_not_copied() -> None:
    message = bytearray(InferTensorContents(fp32_contents=[1.0, 2.0]).SerializeToString())
    spec = TensorSpec("IN", dtypes.FP32, (2,))
    taken: list[int] = []
    data = infer_request.read_contents(spec, [memoryview(message)], "m", taken.append, aside=False)
    message[-4:] = np.float32(7).tobytes()
    assert bytes(data) == np.array([1, 7], np.float32).tobytes()
    assert taken == []


@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
def test_strings(values: list[bytes], aside: bool) -> None:
    data = InferTensorContents(bytes_contents=values).SerializeToString()
    taken: list[int] = []
    assert read("BYTES", data, aside=aside, taken=taken) == join_bytes(values)
    assert sum(taken) == len(join_bytes(values))


def test_as_many_strings_as_there_are() -> None:
    values = [b"x" * (number % 3) for number in range(5 * infer_request.PAUSE_EVERY)]
    data = InferTensorContents(bytes_contents=values).SerializeToString()
    taken: list[int] = []
    assert read("BYTES", data, aside=True, taken=taken) == join_bytes(values)
    assert len(taken) > 5


def test_fields_that_there_are_not_are_left_out() -> None:
    unknown = b"\xa0\x06\x05" + b"\xa9\x06" + b"x" * 8 + b"\xad\x06" + b"y" * 4 + b"\xb2\x06\x02zz"
    wrong_type = b"\x35" + b"abcd"  # one float, of another wire type than that of the field below
    for datatype, field in (("INT32", "int_contents"), ("BYTES", "bytes_contents")):
        value: list[Any] = [b"a"] if datatype == "BYTES" else [1]
        data = InferTensorContents(**{field: value}).SerializeToString()
        assert read(datatype, unknown + data + unknown) == expected(datatype, data)
    assert read("INT32", b"\x15abcd" + b"\x10\x07") == expected("INT32", b"\x15abcd" + b"\x10\x07")
    with pytest.raises(InvalidArgument, match="of type 'FP32', expected datatype 'INT32'"):
        read("INT32", wrong_type)


def test_no_contents() -> None:
    assert read("INT32") == read("INT32", b"") == read("BYTES", b"") == read("FP32", nested_field(6, b"")) == b""


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT32", nested_field(2, b"\x80")),
        ("INT32", nested_field(2, b"\x01" * 200 + b"\x80")),
        ("INT32", nested_field(2, b"\x01" * 200 + b"\xff" * 11 + b"\x01")),
        ("INT32", nested_field(2, b"\xff" * 11 + b"\x01")),
        ("INT32", nested_field(2, b"\x01" * 50 + b"\xff" * 20)),
        ("INT32", b"\x10\x80"),
        ("INT32", b"\x12\x05a"),
        ("INT32", b"\x13\x14"),
        ("FP32", nested_field(6, b"abc")),
        ("FP64", nested_field(7, b"abcd")),
        ("FP32", b"\x35abc"),
        ("BYTES", b"\x42\x05a"),
        ("BYTES", b"\x42"),
        ("BYTES", b"\x43\x44"),
    ],
)
def test_bytes_that_are_no_contents(datatype: str, data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read(datatype, data)


@settings(max_examples=300)
@given(st.sampled_from(sorted(infer_request.CONTENTS)), st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(datatype: str, data: bytes) -> None:
    try:
        found = read(datatype, data)
    except (MalformedMessage, InvalidArgument):
        return
    try:
        wanted = expected(datatype, data)
    except DecodeError:
        return  # numbers of more than 64 bits, which are cut here
    assert found == wanted


def test_contents_of_another_type() -> None:
    data = InferTensorContents(int_contents=[1], fp32_contents=[1.0]).SerializeToString()
    with pytest.raises(InvalidArgument, match=r"'IN' for model 'm', binary data was already supplied\.$"):
        read("INT32", data)
    with pytest.raises(InvalidArgument, match=r"of type 'INT8', expected datatype 'BYTES'$"):
        read("BYTES", data)
    with pytest.raises(InvalidArgument, match=r"of type 'BYTES', expected datatype 'INT8'$"):
        read("INT8", InferTensorContents(bytes_contents=[b""]).SerializeToString())
    with pytest.raises(InvalidArgument, match=r"datatype 'FP16' is raw_input_contents only$"):
        read("FP16", b"")


def test_numbers_that_are_not_packed_are_bounded() -> None:
    assert len(read("INT8", b"\x10\x01" * MAX_FIELDS)) == MAX_FIELDS
    with pytest.raises(InvalidArgument, match="more than the 5000 fields that are allowed, most of them in the con"):
        read("INT8", b"\x10\x01" * (MAX_FIELDS + 1))
    assert len(read("INT8", nested_field(2, b"\x01" * 1_000_000))) == 1_000_000


def test_no_memory_is_taken_before_it_was_asked_for() -> None:
    def take(size: int) -> None:
        raise MemoryError(size)

    spec = TensorSpec("IN", dtypes.INT64, (1,))
    with pytest.raises(MemoryError, match="8000000"):
        infer_request.read_contents(spec, [memoryview(nested_field(3, bytes(1_000_000)))], "m", take, aside=False)
