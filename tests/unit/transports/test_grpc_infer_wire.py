"""The wire form of the inference messages, against protobuf's own reading and writing of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.transports.grpc import wire
from nerite.wire.fields import nested_field, varint
from nerite.wire.grpc_service import InferTensorContents, ModelInferRequest, ModelInferResponse

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
PARAMETERS = st.one_of(
    st.builds(lambda value: {"bool_param": value}, st.booleans()),
    st.builds(lambda value: {"int64_param": value}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda value: {"uint64_param": value}, st.integers(0, 2**64 - 1)),
    st.builds(lambda value: {"string_param": value}, TEXTS),
    st.builds(lambda value: {"double_param": value}, st.floats(allow_nan=False)),
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "model_name": TEXTS,
        "model_version": TEXTS,
        "id": TEXTS,
        "parameters": st.dictionaries(TEXTS, PARAMETERS, max_size=2),
        "inputs": st.lists(
            st.fixed_dictionaries(
                {"name": TEXTS, "datatype": TEXTS, "shape": st.lists(st.integers(-2, 2**40), max_size=3)},
                optional={
                    "contents": st.fixed_dictionaries({"int_contents": st.lists(st.integers(-5, 5), max_size=3)})
                },
            ),
            max_size=3,
        ),
        "outputs": st.lists(st.fixed_dictionaries({"name": TEXTS}), max_size=2),
        "raw_input_contents": st.lists(st.binary(max_size=300), max_size=4),
    },
)


def fields_of(data: bytes) -> list[bytes]:
    """The top-level fields of a serialized message, each as its own bytes."""
    found = []
    at = 0
    view = memoryview(data)
    while at < len(data):
        start = at
        tag, at = wire.read_varint(view, at)
        assert tag & 7 == 2
        size, at = wire.read_varint(view, at)
        at += size
        found.append(data[start:at])
    return found


@given(REQUESTS, st.integers(0, 2**32), st.booleans())
def test_a_request_is_taken_apart_and_nothing_is_lost(described: dict[str, Any], seed: int, shuffled: bool) -> None:
    message = ModelInferRequest(**described)
    data = message.SerializeToString()
    if shuffled:
        fields = fields_of(data)
        random.Random(seed).shuffle(fields)
        data = b"".join(fields)
        message = ModelInferRequest.FromString(data)
    parts = wire.split(memoryview(data))
    assert parts.id == message.id
    assert [bytes(each) for each in parts.raw] == list(message.raw_input_contents)
    message.ClearField("id")
    message.ClearField("raw_input_contents")
    if not parts.raw:
        contents = [b"".join(bytes(each) for each in typed) for typed in parts.typed]
        assert [InferTensorContents.FromString(each) for each in contents] == [each.contents for each in message.inputs]
        for each in message.inputs:
            if each.HasField("contents"):
                each.contents.Clear()
                each.contents.SetInParent()
    assert ModelInferRequest.FromString(parts.header) == message
    if parts.plain:
        contents = [wire.raw_input(len(each)) + bytes(each) for each in parts.raw]
        assert data == parts.header + b"".join(contents)


def test_a_request_as_clients_send_it_is_plain() -> None:
    message = ModelInferRequest(model_name="m", inputs=[{"name": "A"}], raw_input_contents=[b"a", b"bc"])
    data = message.SerializeToString()
    parts = wire.split(memoryview(data))
    assert parts.plain
    assert data[len(parts.header)] == wire.RAW_INPUT
    message.id = "7"
    assert not wire.split(memoryview(message.SerializeToString())).plain
    assert not wire.split(memoryview(data + parts.header)).plain
    # A length may be written longer than need be.
    assert not wire.split(memoryview(data[:-4] + b"\x3a\x82\x00bc")).plain


def test_raw_contents_are_views_and_not_copies() -> None:
    data = bytearray(ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString())
    (view,) = wire.split(memoryview(data)).raw
    data[-1:] = b"X"
    assert view == b"abX"


def test_of_two_ids_the_last_counts() -> None:
    data = nested_field(wire.ID >> 3, b"one") + nested_field(wire.ID >> 3, b"two")
    assert wire.split(memoryview(data)).id == ModelInferRequest.FromString(data).id == "two"


def test_unknown_fields_are_left_out() -> None:
    unknown = b"\xa0\x06\x05" + b"\xa9\x06" + b"x" * 8 + b"\xad\x06" + b"y" * 4 + b"\xb2\x06\x02zz"
    another_type = b"\x08\x01" + b"\x38\x01"
    name, raw = nested_field(wire.MODEL_NAME >> 3, b"m"), nested_field(wire.RAW_INPUT >> 3, b"r")
    for data in (name + unknown + raw, unknown + name + another_type + raw + unknown):
        parts = wire.split(memoryview(data))
        assert (parts.header, parts.plain) == (name, False)
        assert [bytes(each) for each in parts.raw] == [b"r"]


def test_contents_that_come_in_pieces_are_taken_out_in_their_order() -> None:
    pieces = [InferTensorContents(int_contents=values).SerializeToString() for values in ([1, 2], [3])]
    inputs = nested_field(1, b"A") + b"".join(nested_field(5, piece) for piece in pieces)
    parts = wire.split(memoryview(nested_field(5, nested_field(1, b"B")) + nested_field(5, inputs)))
    assert [[bytes(each) for each in typed] for typed in parts.typed] == [[], pieces]
    without, with_contents = ModelInferRequest.FromString(parts.header).inputs
    assert (without.HasField("contents"), with_contents.HasField("contents")) == (False, True)
    assert (without.name, with_contents.name, with_contents.contents) == ("B", "A", InferTensorContents())


MANY = wire.MAX_FIELDS + 1


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x08\x00" * MANY, "unknown"),
        (b"\x3a\x00" * MANY, "'raw_input_contents'"),
        (b"\x22\x00" * MANY, "'parameters'"),
        (b"\x2a\x00" * MANY, "'inputs'"),
        (b"\x8a\x00\x00" * MANY, "'model_name'"),
        (nested_field(5, b"\x08\x00" * MANY), "in 'inputs'"),
        (b"\x2a\x02\x0a\x00" * (MANY // 2 + 1), "in 'inputs'"),
        (nested_field(6, b"\x0a\x00" * MANY), "in 'outputs'"),
        (nested_field(6, b"\x0a\x00" * MANY * 8) + b"\x3a\x00", "in 'outputs'"),
    ],
)
def test_more_fields_than_are_read(data: bytes, what: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        wire.split(memoryview(data))
    text = f"the request has more than the 5000 fields that are allowed, most of them {what}"
    assert refused.value.message == text


def test_as_many_fields_as_are_read() -> None:
    assert wire.split(memoryview(b"\x08\x00" * wire.MAX_FIELDS)).header == b""
    raw = wire.split(memoryview(b"\x3a\x00" * wire.MAX_REPEATED)).raw
    assert len(raw) == wire.MAX_REPEATED
    with pytest.raises(
        InvalidArgument, match=r"^'raw_input_contents' has 1025 elements, more than the 1024 that are al"
    ):
        wire.split(memoryview(b"\x3a\x00" * (wire.MAX_REPEATED + 1)))


def test_more_bytes_than_a_header_has() -> None:
    values = [
        nested_field(4, nested_field(1, b"%d" % number) + nested_field(2, nested_field(3, bytes(2**20))))
        for number in range(5)
    ]
    assert len(wire.split(memoryview(b"".join(values[:3]))).header) > 3 * 2**20
    with pytest.raises(InvalidArgument, match="bytes besides its tensors, more than the 4194304 that are allowed"):
        wire.split(memoryview(b"".join(values)))
    tensor = nested_field(1, b"A") + nested_field(5, nested_field(6, bytes(8 * 2**20)))
    assert len(wire.split(memoryview(nested_field(5, tensor))).header) < 100


def test_an_id_of_any_length() -> None:
    with pytest.raises(InvalidArgument, match="'id' is 5000000 bytes long, more than the 1024 characters that are all"):
        wire.split(memoryview(nested_field(3, b"x" * 5_000_000)))
    assert wire.id_of(memoryview(nested_field(3, b"x" * 5_000_000))) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a\x80",
        b"\x3a\x05abc",
        b"\x1a\x01\xff",
        b"\x0b\x0c",
        b"\x0f\x01",
        b"\x09\x01\x02",
        b"\x0d\x01\x02",
        b"\x08\x80",
        b"\x02\x00",
        b"\x05abcd",
        b"\x80\x80\x80\x80\x80\x01\x00",
        b"\x2a\x02\x0a\x05",
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(wire.MalformedMessage):
        wire.split(memoryview(data))


@settings(max_examples=300)
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_taken_apart_or_refused(data: bytes, cut: bool) -> None:
    whole = ModelInferRequest(model_name="m", id="é", raw_input_contents=[b"abc"]).SerializeToString()
    data = whole[: len(data)] + data if cut else data
    try:
        parts = wire.split(memoryview(data))
    except wire.MalformedMessage:
        return
    try:
        message = ModelInferRequest.FromString(data)
    except DecodeError:
        # Whatever it is that protobuf does not like is still in the header, which protobuf reads, or in the contents.
        if not any(parts.typed):
            with pytest.raises(DecodeError):
                ModelInferRequest.FromString(parts.header)
        return
    assert parts.id == message.id
    assert [bytes(each) for each in parts.raw] == list(message.raw_input_contents)


@given(st.integers(0, 2**63))
def test_numbers(value: int) -> None:
    encoded = varint(value)
    assert wire.read_varint(memoryview(b"x" + encoded + b"y"), 1) == (value, 1 + len(encoded))


@given(st.lists(st.binary(max_size=300), max_size=4), TEXTS.filter(bool))
def test_a_response_is_what_protobuf_would_write(outputs: list[bytes], id: str) -> None:
    contents = [wire.raw_output(len(output)) + output for output in outputs]
    expected = ModelInferResponse(id=id, raw_output_contents=outputs)
    assert wire.response_id(id) + b"".join(contents) == expected.SerializeToString()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2_097_152])
def test_contents_of_any_size(size: int) -> None:
    data = bytes(size)
    assert ModelInferResponse.FromString(wire.raw_output(size) + data).raw_output_contents[0] == data
    assert ModelInferRequest.FromString(wire.raw_input(size) + data).raw_input_contents[0] == data


# A first look at a large message


def large(**more: Any) -> bytes:
    fields = {
        "model_name": "m\u00e9",
        "model_version": "3",
        "inputs": [{"name": "A"}],
        "raw_input_contents": [b"x" * 500],
    }
    return ModelInferRequest(**{**fields, **more}).SerializeToString()


def test_a_first_look() -> None:
    data = large()
    name, version, at = wire.peek(memoryview(data)[:100])
    assert (name, version) == ("m\u00e9", "3")
    assert data[at:] == b"x" * 500


def test_a_first_look_at_a_request_with_an_id() -> None:
    data = large(id="seven")
    name, _, at = wire.peek(memoryview(data)[:100])
    assert (name, data[at:]) == ("m\u00e9", b"x" * 500)


@pytest.mark.parametrize("end", range(40))
def test_a_first_look_at_too_little(end: int) -> None:
    name, version, at = wire.peek(memoryview(large())[:end])
    assert name in ("", "m\u00e9")
    assert version in ("", "3")
    assert at == 0 or large()[at:] == b"x" * 500


def test_a_first_look_at_much() -> None:
    assert wire.peek(memoryview(large(model_name="x" * 5000))) == ("", "", 0)
    assert wire.peek(memoryview(b"\x22\x00" * 100 + large()))[0] == ""


@given(st.binary(max_size=60))
def test_a_first_look_at_anything(data: bytes) -> None:
    name, version, at = wire.peek(memoryview(data))
    assert isinstance(name, str)
    assert isinstance(version, str)
    assert 0 <= at <= len(data)
