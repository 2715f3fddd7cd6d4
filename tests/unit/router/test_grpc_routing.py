"""What the router finds in the beginning of a gRPC message."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.router.grpc_routing import UNKNOWN, MessageFacts, facts_of, name_of
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


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({}, MessageFacts("m", "2")),
        ({"priority": 3, "x": "sequence"}, MessageFacts("m", "2")),
        ({"sequence_id": 7, "sequence_start": True}, MessageFacts("m", "2", "7", True)),
        ({"sequence_id": "text", "sequence_end": True}, MessageFacts("m", "2", "text", False, True)),
        ({"sequence_id": 0, "sequence_start": True}, MessageFacts("m", "2", "", True)),
        ({"sequence_id": 1 << 62, "a": 1, "b": "c"}, MessageFacts("m", "2", str(1 << 62))),
    ],
)
def test_facts(fields, facts):
    message = request(**fields).SerializeToString()
    assert facts_of(framed(message), 0, complete=True) == facts
    for wbits, window in ((31, 31), (15, 15)):
        packer = zlib.compressobj(wbits=wbits)
        packed = packer.compress(message) + packer.flush()
        assert facts_of(framed(packed, True), window, complete=True) == facts


def test_a_number_without_sign_and_typed_contents():
    made = request()
    made.parameters["sequence_id"].uint64_param = (1 << 64) - 1
    made.inputs[0].contents.fp32_contents.extend([1.0] * 100)
    del made.raw_input_contents[:]
    assert facts_of(framed(made.SerializeToString()), 0, complete=True) == MessageFacts("m", "2", str((1 << 64) - 1))


def test_a_message_that_is_still_arriving():
    whole = framed(request(sequence_id=5).SerializeToString())
    found = [facts_of(whole[:size], 0, complete=False) for size in range(len(whole) + 1)]
    assert found[0] is None and found[4] is None
    assert {each for each in found if each is not None} == {MessageFacts("m", "2", "5")}
    assert sum(each is not None for each in found) == 1001, "as soon as the header is complete"
    assert facts_of(whole[:30], 0, complete=True).model == "m"


def test_the_prompt_of_a_language_model():
    made = wire.ModelInferRequest(model_name="llm", raw_input_contents=[b"\5\0\0\0hello", b"more"])
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.inputs.add(name="other", datatype="BYTES", shape=[1])
    found = facts_of(framed(made.SerializeToString()), 0, complete=True)
    assert bytes(found.prompt).startswith(b"\5\0\0\0hello") and found.model == "llm"
    assert not facts_of(framed(request().SerializeToString()), 0, complete=True).prompt


def test_fields_in_another_order():
    message = request().SerializeToString()
    swapped = wire.ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString() + message
    assert facts_of(framed(swapped), 0, complete=True).model == "m"


@pytest.mark.parametrize("message", [b"", b"\xff\xff\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x07\x01"])
def test_what_is_no_message_has_no_facts(message):
    assert facts_of(framed(message), 0, complete=True) == UNKNOWN
    assert facts_of(framed(message, True), 31, complete=True) == UNKNOWN
    assert facts_of(memoryview(b""), 0, complete=True) == UNKNOWN


def test_names_are_bounded():
    with pytest.raises(InvalidArgument):
        facts_of(framed(request(sequence_id="s" * 5_000).SerializeToString()), 0, complete=True)


def test_the_name_in_an_administrative_message():
    message = wire.ModelReadyRequest(name="m", version="1").SerializeToString()
    assert name_of(framed(message), 0, 0x0A) == "m"
    assert name_of(framed(b"\xff"), 0, 0x0A) == ""
    assert name_of(memoryview(b""), 0, 0x0A) == ""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.sampled_from([0, 15, 31]), st.booleans())
def test_any_bytes(message, compressed, window, complete):
    found = facts_of(framed(message, compressed), window, complete=complete)
    assert found is not None and len(found.model) <= 200
