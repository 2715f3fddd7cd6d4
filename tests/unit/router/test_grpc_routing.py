"""What the router finds in the beginning of a gRPC message."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.router.grpc_routing import CallMessages, MessageFacts, facts_of, facts_of_large, name_of
from nerite.wire import grpc_service as wire


def request(**fields: object) -> wire.ModelInferRequest:
    made = wire.ModelInferRequest(model_name="m", model_version="2", id="an id", raw_input_contents=[bytes(1000)])
    made.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 250])
    for name, value in fields.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def framed(message: bytes, compressed: bool = False) -> memoryview:
    return memoryview(bytes((compressed,)) + len(message).to_bytes(4) + message)


def packed(message: bytes, window: int) -> memoryview:
    packer = zlib.compressobj(wbits=window)
    return framed(packer.compress(message) + packer.flush(), True)


def followed(call: memoryview, step: int, window: int = 0) -> MessageFacts:
    """Return what is found in a call that comes in pieces of ``step`` bytes."""
    messages = CallMessages(window, one_model=True)
    for at in range(0, len(call), step):
        messages.feed(call[at : at + step])
    return messages.settle()


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({}, MessageFacts("m", "2")),
        ({"priority": 3, "x": "sequence_"}, MessageFacts("m", "2")),
        ({"sequence_id": 7, "sequence_start": True}, MessageFacts("m", "2", "7", True)),
        ({"sequence_id": "text", "sequence_end": True}, MessageFacts("m", "2", "text", False, True)),
        ({"sequence_id": 0, "sequence_start": True}, MessageFacts("m", "2", "", True)),
        ({"sequence_id": 1 << 62, "a": 1, "b": "c"}, MessageFacts("m", "2", str(1 << 62))),
        ({"long": "x" * 100_000, "sequence_id": 7}, MessageFacts("m", "2", "7")),
    ],
)
def test_facts(fields, facts):
    message = request(**fields).SerializeToString()
    assert facts_of(framed(message), 0) == facts
    for step in (1, 7, 64, 1 << 20):
        assert followed(framed(message), step) == facts
    for window in (31, 15):
        found = facts_of(packed(message, window), window)
        assert (facts_of_large(packed(message, window), window, 1 << 20) if found is None else found) == facts
        for step in (1, 7, 1 << 20):
            if "long" not in fields:  # which unpacks to more than the router follows in a stream
                assert followed(packed(message, window), step, window) == facts


def test_a_number_without_sign_and_typed_contents():
    made = request()
    made.parameters["sequence_id"].uint64_param = (1 << 64) - 1
    made.inputs[0].contents.fp32_contents.extend([1.0] * 100)
    del made.raw_input_contents[:]
    assert facts_of(framed(made.SerializeToString()), 0) == MessageFacts("m", "2", str((1 << 64) - 1))


def test_a_message_that_is_still_arriving():
    whole = framed(request(sequence_id=5).SerializeToString())
    messages = CallMessages(0)
    found = []
    for at in range(len(whole)):
        messages.feed(whole[at : at + 1])
        found.append(messages.facts)
    assert {each for each in found if each is not None} == {MessageFacts("m", "2", "5")}
    assert sum(each is not None for each in found) == 1001, "as soon as the header is complete"
    messages = CallMessages(0)
    messages.feed(whole[:30])
    assert messages.facts is None and messages.settle().model == "m"


def test_the_prompt_of_a_language_model():
    made = wire.ModelInferRequest(model_name="llm", raw_input_contents=[b"\5\0\0\0hello", b"more"])
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.inputs.add(name="other", datatype="BYTES", shape=[1])
    message = made.SerializeToString()
    for found in (facts_of(framed(message), 0), followed(framed(message), 50), facts_of(packed(message, 31), 31)):
        assert found is not None and found.model == "llm"
        assert bytes(found.prompt).startswith(b"\5\0\0\0")
    assert bytes(facts_of(framed(message), 0).prompt).startswith(b"\5\0\0\0hello")
    assert not facts_of(framed(request().SerializeToString()), 0).prompt


def test_fields_in_another_order():
    message = request().SerializeToString()
    swapped = wire.ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString() + message
    assert facts_of(framed(swapped), 0).model == "m"


CHEAP = request().SerializeToString()
MORE = wire.ModelInferRequest(model_name="add_sub").SerializeToString()


@pytest.mark.parametrize("again", [MORE, b"\x8a\0" + MORE[1:], b"\x0a\x87\0" + MORE[2:]])
def test_of_two_models_the_last_counts_as_for_the_member(again):
    assert wire.ModelInferRequest.FromString(CHEAP + again).model_name == "add_sub"
    assert facts_of(framed(CHEAP + again), 0).model == "add_sub"
    assert facts_of(packed(CHEAP + again, 31), 31).model == "add_sub"
    large = wire.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1_000_000)]).SerializeToString() + again
    assert facts_of(packed(large, 31), 31) is None
    assert facts_of_large(packed(large, 31), 31, 2_000_000).model == "add_sub"
    with pytest.raises(NeriteError, match="after decompression"):
        facts_of_large(packed(large, 31), 31, 1_000_000)


def test_no_name_at_the_end_is_no_name():
    assert facts_of(framed(CHEAP + b"\x0a\0"), 0).model == ""


@pytest.mark.parametrize("step", [1, 100, 1 << 20])
@pytest.mark.parametrize("window", [0, 31])
def test_a_stream_is_about_one_model(step, window):
    def frame(message):
        return bytes(packed(message, window) if window else framed(message))

    same = frame(CHEAP) + frame(b"") + frame(CHEAP)
    assert followed(memoryview(same), step, window).model == "m"
    with pytest.raises(InvalidArgument, match="use a call for"):
        followed(memoryview(same + frame(MORE)), step, window)
    with pytest.raises(InvalidArgument, match="use a call for"):
        followed(memoryview(frame(b"") + frame(MORE)), step, window)


def test_a_stream_that_is_not_admitted_by_its_model_may_have_several():
    messages = CallMessages(0)
    messages.feed(memoryview(bytes(framed(CHEAP)) + bytes(framed(MORE)) + b"anything"))
    assert messages.settle().model == "m"


def test_what_was_passed_on_is_not_contradicted():
    large = wire.ModelInferRequest(model_name="m", raw_input_contents=[bytes(100_000)]).SerializeToString() + MORE
    whole = framed(large)
    messages = CallMessages(0)
    messages.feed(whole[:70_000])
    assert messages.facts == MessageFacts("m")
    with pytest.raises(InvalidArgument, match="'add_sub'"):
        messages.feed(whole[70_000:])


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        b"\x0a\xff",
        b"\x0a\x02\xff\xfe",
        b"\x07\x01",
        b"\x0b\x0c",
        b"\x0a\5m",
        b"\x8a\x80\x80\x80\x10\1m",
    ],
)
def test_what_is_no_message_is_refused(message):
    """A group (the fifth), or a tag of more than 32 bits (the last), is read by some parsers."""
    with pytest.raises(NeriteError):
        facts_of(framed(message), 0)
    with pytest.raises(NeriteError):
        facts_of(framed(message, True), 31)
    with pytest.raises(NeriteError):
        followed(framed(message), 1)


def test_messages_that_say_nothing():
    assert facts_of(framed(b""), 0) == MessageFacts()
    assert followed(memoryview(b""), 1) == MessageFacts()


def test_what_is_compressed_oddly_is_refused():
    message = request().SerializeToString()
    twice = framed(bytes(packed(message, 31)[5:]) * 2, True)
    for call, window in ((packed(message, 31), 0), (twice, 31), (packed(message, 31)[:-9], 31)):
        with pytest.raises(NeriteError):
            facts_of(call, window)
    for call in (twice, packed(bytes(10_000_000), 31)):
        with pytest.raises(NeriteError):
            followed(call, 1000, 31)


def test_names_and_fields_are_bounded():
    with pytest.raises(InvalidArgument):
        facts_of(framed(request(sequence_id="s" * 5_000).SerializeToString()), 0)
    with pytest.raises(InvalidArgument):
        facts_of(framed(wire.ModelInferRequest(model_name="m" * 5_000).SerializeToString()), 0)
    for many, told in ((b"\x3a\0", "5000 fields"), (b"\x22\0", "parameters"), (b"\x7a\0", "5000 fields")):
        with pytest.raises(InvalidArgument, match=told):
            facts_of(framed(many * 4_000_000), 0)


def test_the_name_in_an_administrative_message():
    message = wire.ModelReadyRequest(name="m", version="1").SerializeToString()
    assert name_of(framed(message), 0, 0x0A) == "m"
    assert name_of(framed(message + wire.ModelReadyRequest(name="n").SerializeToString()), 0, 0x0A) == "n"
    assert name_of(framed(b"\xff"), 0, 0x0A) == ""
    assert name_of(memoryview(b""), 0, 0x0A) == ""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.sampled_from([0, 15, 31]), st.integers(1, 50))
def test_any_bytes(message, compressed, window, step):
    try:
        found = facts_of(framed(message, compressed), window)
    except NeriteError:
        with pytest.raises(NeriteError):
            followed(framed(message, compressed), step, window)
    else:
        assert found is not None and len(found.model) <= 200
        assert followed(framed(message, compressed), step, window).model == found.model
        if not compressed:
            assert wire.ModelInferRequest.FromString(message).model_name == found.model
