"""Infer requests over gRPC: anything that protobuf can write, and every way to get it wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_grpc_infer_wire import fields_of

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import GRPC_PLANS
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.request import RequestHeader
from nerite.core.tensor import DataType, TensorSpec, join_bytes
from nerite.transports.access import SenderHeaders
from nerite.transports.grpc import messages as status
from nerite.transports.grpc import wire
from nerite.transports.grpc.infer_request import InferReader, broken
from nerite.wire.grpc_service import ModelInferRequest

CONTENTS = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-128, 127)),
    "INT16": ("int_contents", st.integers(-(2**15), 2**15 - 1)),
    "INT32": ("int_contents", st.integers(-(2**31), 2**31 - 1)),
    "INT64": ("int64_contents", st.integers(-(2**63), 2**63 - 1)),
    "UINT8": ("uint_contents", st.integers(0, 255)),
    "UINT16": ("uint_contents", st.integers(0, 2**16 - 1)),
    "UINT32": ("uint_contents", st.integers(0, 2**32 - 1)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32, allow_nan=False)),
    "FP64": ("fp64_contents", st.floats(allow_nan=False)),
    "BYTES": ("bytes_contents", st.binary(max_size=6)),
}

Read = tuple[RequestHeader, str, list[Any]]


def read(reader: InferReader, message: Any) -> Read:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return of_view(reader, memoryview(bytearray(data)))


def of_view(reader: InferReader, view: memoryview) -> Any:
    """What is read of a message, as ``Messages`` has it read."""
    try:
        parts = wire.split(view)
    except wire.MalformedMessage:
        raise broken() from None
    return reader.read(parts, view, lambda size: None)


def same(one: Read, other: Read) -> bool:
    return (one[0].identity(), one[1], [bytes(each) for each in one[2]]) == (
        other[0].identity(),
        other[1],
        [bytes(each) for each in other[2]],
    )


@pytest.fixture
def reader() -> InferReader:
    return InferReader(SenderHeaders({"x-forwarded": "yes"}))


def tensor(name: str = "IN", datatype: str = "INT32", shape: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def test_tensors_in_shared_memory_stand_among_the_others(reader: InferReader) -> None:
    there = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
    message = ModelInferRequest(
        model_name="m",
        inputs=[tensor("A"), tensor("B", parameters=there), tensor("C")],
        raw_input_contents=[b"a" * 8, b"c" * 8],
    )
    for _ in range(2):
        header, _, (first, place, last) = read(reader, message)
        assert (bytes(first), bytes(last)) == (b"a" * 8, b"c" * 8)
        assert (place.region, place.offset, place.byte_size) == ("r", 0, 8)
        assert header.shared
    message.raw_input_contents.append(b"d" * 8)
    _, _, (first, place, last) = read(reader, message)
    assert (bytes(first), place.region, bytes(last)) == (b"a" * 8, "r", b"c" * 8), "one for each input, as for Triton"
    message.raw_input_contents.append(b"e" * 8)
    with pytest.raises(InvalidArgument, match="expected 2 raw_input_contents entries for model 'm', got 4"):
        read(reader, message)
    del message.raw_input_contents[1:]
    with pytest.raises(InvalidArgument, match="unable to find data for input tensor 'C' for model 'm'"):
        read(reader, message)


def test_everything_a_request_can_say(reader: InferReader) -> None:
    message = ModelInferRequest(
        model_name="m",
        model_version="3",
        id="seven",
        parameters={
            "sequence_id": {"int64_param": 5},
            "sequence_start": {"bool_param": True},
            "sequence_end": {"bool_param": False},
            "priority": {"uint64_param": 2},
            "timeout": {"int64_param": 1000},
            "triton_enable_empty_final_response": {"bool_param": True},
            "text": {"string_param": "x"},
            "flag": {"bool_param": True},
            "number": {"int64_param": 7},
            "half": {"double_param": 0.5},
        },
        inputs=[tensor("A", "FP32", (1, 2)), tensor("B", "BYTES", (1,))],
        outputs=[{"name": "X"}, {"name": "Y", "parameters": {"classification": {"int64_param": 3}}}],
        raw_input_contents=[b"12345678", join_bytes(["a"])],
    )
    header, id, data = read(reader, message)
    assert id == "seven"
    assert (header.model_name, header.model_version) == ("m", "3")
    assert header.inputs == (TensorSpec("A", dtypes.FP32, (1, 2)), TensorSpec("B", dtypes.BYTES, (1,)))
    assert [(each.name, each.binary, each.classification) for each in header.outputs] == [
        ("X", True, 0),
        ("Y", True, 3),
    ]
    assert header.parameters == {"text": "x", "flag": True, "number": 7, "half": 0.5, "x-forwarded": "yes"}
    assert (header.priority, header.timeout_us) == (2, 1000)
    assert (header.sequence_id, header.sequence_start, header.sequence_end) == (5, True, False)
    assert [bytes(each) for each in data] == [b"12345678", join_bytes(["a"])]


def test_a_sequence_may_be_called_by_a_text(reader: InferReader) -> None:
    message = ModelInferRequest(parameters={"sequence_id": {"string_param": "x" * 128}})
    assert read(reader, message)[0].sequence_id == "x" * 128


def test_a_sequence_beyond_a_signed_integer(reader: InferReader) -> None:
    message = ModelInferRequest(parameters={"sequence_id": {"int64_param": -1}})
    assert read(reader, message)[0].sequence_id == 2**64 - 1


TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=4)
CUSTOM = st.dictionaries(
    st.text(st.sampled_from("abc"), min_size=1, max_size=2),
    st.one_of(
        st.builds(lambda value: {"bool_param": value}, st.booleans()),
        st.builds(lambda value: {"int64_param": value}, st.integers(-3, 3)),
        st.builds(lambda value: {"string_param": value}, TEXTS),
        st.builds(lambda value: {"double_param": value}, st.sampled_from((0.0, 1.0, 0.5))),
    ),
    max_size=3,
)


@st.composite
def typed_tensor(draw: st.DrawFn, number: int) -> tuple[dict[str, Any], bytes]:
    """A tensor with typed contents, and its bytes."""
    datatype = draw(st.sampled_from(sorted(CONTENTS)))
    field, elements = CONTENTS[datatype]
    values = draw(st.lists(elements, max_size=4))
    shape = draw(st.sampled_from([(len(values),), (1, len(values)), (len(values), 1)]))
    data = join_bytes(values) if datatype == "BYTES" else np.array(values, dtypes.BY_NAME[datatype].numpy).tobytes()
    return tensor(f"IN{number}", datatype, shape, contents={field: values}), data


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, list[bytes]]:
    """Any request, typed or raw, and the bytes of its tensors."""
    pairs = [draw(typed_tensor(number)) for number in range(draw(st.integers(0, 3)))]
    inputs = [described for described, _ in pairs]
    data = [raw for _, raw in pairs]
    more: dict[str, Any] = {}
    if draw(st.booleans()) and inputs:
        for each in inputs:
            del each["contents"]
        more["raw_input_contents"] = data
    message = ModelInferRequest(
        model_name=draw(NAMES),
        model_version=draw(st.sampled_from(("", "1"))),
        id=draw(st.sampled_from(("", "", "7", "é"))),
        parameters=draw(CUSTOM),
        inputs=inputs,
        outputs=[{"name": name} for name in draw(st.lists(NAMES, max_size=2))],
        **more,
    )
    return message, data


IN_ORDER = (b"\x2a", b"\x32", b"\x3a")
"""Tags of inputs, outputs and raw contents."""


def shuffled(serialized: bytes, rng: random.Random) -> bytes:
    """The same message with its fields in another order; those of one kind keep their own."""
    fields = fields_of(serialized)
    rng.shuffle(fields)
    for tag in IN_ORDER:
        in_order = iter([field for field in fields_of(serialized) if field.startswith(tag)])
        fields = [next(in_order) if field.startswith(tag) else field for field in fields]
    return b"".join(fields)


def says(found: Read, message: Any, data: list[bytes]) -> None:
    """Check that what was read is what the message says."""
    header, id, tensors = found
    assert (header.model_name, header.model_version, id) == (message.model_name, message.model_version, message.id)
    assert [(spec.name, spec.datatype.name, spec.shape) for spec in header.inputs] == [
        (each.name, each.datatype, tuple(each.shape)) for each in message.inputs
    ]
    assert [each.name for each in header.outputs] == [each.name for each in message.outputs]
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()
    }
    assert {key: (type(value), value) for key, value in header.parameters.items()} == {
        key: (type(value), value) for key, value in parameters.items()
    }
    assert [bytes(each) for each in tensors] == data


@given(st.lists(requests(), max_size=4), st.integers(0, 2**32))
def test_any_request_in_any_order_first_seen_or_known(examples: list[tuple[Any, list[bytes]]], seed: int) -> None:
    reader = InferReader(SenderHeaders({}))
    rng = random.Random(seed)
    for message, data in examples:
        serialized = message.SerializeToString()
        for form in (serialized, shuffled(serialized, rng), serialized, shuffled(serialized, rng)):
            framed = status.framed(form)
            before = reader.known(framed)
            first = read(reader, form)
            says(first, message, data)
            assert same(read(reader, form), first)
            if before is not None:
                assert same((*before[:1], "", before[1]), first)
            assert same(read(InferReader(SenderHeaders({})), form), first)


def test_what_was_seen_before_does_not_change_what_is_read() -> None:
    """The same header with raw contents, without them, and with others."""
    inputs = [tensor("A", "FP32", (0,))]
    with_raw = ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=[b""])
    without = ModelInferRequest(model_name="m", inputs=inputs)
    reader = InferReader(SenderHeaders({}))
    read(reader, with_raw)
    with pytest.raises(InvalidArgument, match="unable to find data for input tensor 'A'"):
        read(reader, without)
    assert same(read(reader, with_raw), read(InferReader(SenderHeaders({})), with_raw))


def test_other_data_behind_the_same_words_is_known(reader: InferReader) -> None:
    inputs = [tensor("A"), tensor("B"), tensor("C", "UINT8", (0,))]

    def framed(*contents: bytes, **more: Any) -> bytes:
        message = ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=contents, **more)
        return status.framed(message.SerializeToString())

    first = framed(b"12345678", b"abcdefgh", b"")
    assert reader.known(first) is None
    header, _, _ = of_view(reader, memoryview(bytearray(first[5:])))
    for form in (bytes, memoryview):
        found = reader.known(form(framed(b"87654321", b"hgfedcba", b"")))
        assert found == (header, [b"87654321", b"hgfedcba", b""])
        assert all(isinstance(each, bytearray) for each in found[1])
    # As long, and yet otherwise.
    assert reader.known(framed(b"1234567", b"abcdefghi", b"")) is None
    assert reader.known(framed(b"", b"12345678", b"abcdefgh")) is None
    assert reader.known(b"\1" + first[1:]) is None
    assert reader.known(framed(b"12345678", b"abcdefgh", b"", id="7")) is None


def test_lengths_that_are_written_long_are_read_and_not_known(reader: InferReader) -> None:
    whole = ModelInferRequest(model_name="m", inputs=[tensor()], raw_input_contents=[b"12345678"]).SerializeToString()
    long = whole[:-10] + b"\x3a\x88\x00" + whole[-8:]
    for _ in range(2):
        assert [bytes(each) for each in read(reader, long)[2]] == [b"12345678"]
        assert reader.known(status.framed(long)) is None


def test_requests_that_say_the_same_have_one_header(reader: InferReader) -> None:
    message = ModelInferRequest(model_name="m", inputs=[tensor()], raw_input_contents=[bytes(8)])
    first = read(reader, message)[0]
    message.raw_input_contents[0] = b"x" * 8
    assert read(reader, message)[0] is first
    message.id = "7"
    assert read(reader, message)[0] is first
    typed = ModelInferRequest(model_name="m", inputs=[tensor(contents={"int_contents": [1, 2]})])
    assert read(reader, typed)[0] is first


def test_values_that_python_calls_equal_are_kept_apart(reader: InferReader) -> None:
    kinds = [{"int64_param": 1}, {"bool_param": True}, {"double_param": 1.0}, {"string_param": "1"}]
    values = [read(reader, ModelInferRequest(parameters={"x": kind}))[0].parameters["x"] for kind in kinds]
    assert [type(value) for value in values] == [int, bool, float, str]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPC_PLANS, "limit", 256 * 1024)
    reader = InferReader(SenderHeaders({}))
    messages = [
        ModelInferRequest(model_name=str(number), inputs=[tensor()], raw_input_contents=[bytes(8)])
        for number in range(500)
    ]
    headers = []
    for message in messages:
        headers.append(read(reader, message)[0])
        assert GRPC_PLANS.used <= GRPC_PLANS.limit
    assert 0 < sum(reader.known(status.framed(message.SerializeToString())) is not None for message in messages) < 100
    assert read(reader, messages[-1])[0] is headers[-1]
    assert read(reader, messages[0])[0] is not headers[0]
    outputs = [ModelInferRequest.InferRequestedOutputTensor(name=f"{number} {'x' * 1000}") for number in range(300)]
    large = ModelInferRequest(inputs=[tensor()], outputs=outputs, raw_input_contents=[bytes(8)])
    assert read(reader, large)[0] is not read(reader, large)[0]


def test_of_messages_of_one_length_the_last_four_are_known() -> None:
    reader = InferReader(SenderHeaders({}))
    messages = [
        ModelInferRequest(model_name=str(number), inputs=[tensor()], raw_input_contents=[bytes(8)]).SerializeToString()
        for number in range(9)
    ]
    framed = [status.framed(message) for message in messages]
    for number, message in enumerate(messages):
        of_view(reader, memoryview(message))
        known = [reader.known(each) for each in framed[: number + 1]]
        names = [each[0].model_name if each else None for each in known]
        assert names == [str(of) if of > number - 4 else None for of in range(number + 1)]


def test_raw_contents_are_not_copied(reader: InferReader) -> None:
    message = ModelInferRequest(model_name="m", inputs=[tensor()], raw_input_contents=[b"12345678"])
    for _ in range(2):
        raw = bytearray(message.SerializeToString())
        _, _, (view,) = of_view(reader, memoryview(raw))
        raw[-1:] = b"X"
        assert view == b"1234567X"


@pytest.mark.parametrize(
    ("datatype", "field", "values", "expected"),
    [
        (dtypes.INT8, "int_contents", [128, -129], [-128, 127]),
        (dtypes.UINT8, "uint_contents", [256, 511], [0, 255]),
        (dtypes.INT16, "int_contents", [32768], [-32768]),
        (dtypes.UINT16, "uint_contents", [65537], [1]),
        (dtypes.UINT64, "uint64_contents", [1, 2**64 - 1, 2**63 + 1], [1, 2**64 - 1, 2**63 + 1]),
        (dtypes.INT64, "int64_contents", [-(2**63), 2**63 - 1, 2**53 + 1], [-(2**63), 2**63 - 1, 2**53 + 1]),
    ],
)
def test_whole_numbers_are_exact_and_wrap_server_context(
    reader: InferReader, datatype: DataType, field: str, values: list[int], expected: list[int]
) -> None:
    described = tensor("IN", datatype.name, (len(values),), contents={field: values})
    _, _, (data,) = read(reader, ModelInferRequest(inputs=[described]))
    assert np.frombuffer(data, datatype.numpy).tolist() == expected


def request(*inputs: dict[str, Any], **more: Any) -> Any:
    return ModelInferRequest(model_name="M", inputs=inputs, **more)


def with_parameter(key: str, **choice: Any) -> Any:
    return request(parameters={key: choice})


RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
    "'triton_' are allowed: triton_enable_empty_final_response"
)


def wrong_type(key: str, wording: str) -> str:
    return f"invalid value type for '{key}' parameter, expected {wording}."


REGION = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
MISTAKES = [
    (b"\xff\xff\xff", Internal, "Unable to parse request"),
    (b"\x0a\x01\xff", Internal, "Unable to parse request"),
    (b"\x2a\x02\x0a\x05", Internal, "Unable to parse request"),
    (request(tensor()), InvalidArgument, "unable to find data for input tensor 'IN' for model 'M' in request."),
    (
        request(tensor("A"), tensor("B"), raw_input_contents=[bytes(8)]),
        InvalidArgument,
        "unable to find data for input tensor 'B' for model 'M' in request.",
    ),
    (
        request(tensor(contents={"int_contents": [1, 2]}), raw_input_contents=[bytes(8)]),
        InvalidArgument,
        "contents field must not be specified when using raw_input_contents for 'IN' for model 'M'",
    ),
    (
        request(tensor(contents={"fp32_contents": [1.0, 2.0]})),
        InvalidArgument,
        "unexpected explicit tensor data for input tensor 'IN' for model 'M' of type 'FP32', expected datatype 'INT32'",
    ),
    (
        request(tensor(contents={"int_contents": [1, 2], "fp32_contents": [1.0, 2.0]})),
        InvalidArgument,
        "unexpected explicit tensor data for input tensor 'IN' for model 'M', binary data was already supplied.",
    ),
    (with_parameter("triton_x", bool_param=True), InvalidArgument, RESERVED),
    *(
        (
            with_parameter("sequence_id", **choice),
            InvalidArgument,
            wrong_type("sequence_id", "int64_param or string_param"),
        )
        for choice in ({"bool_param": True}, {"double_param": 1.0}, {})
    ),
    *(
        (with_parameter(key, int64_param=1), InvalidArgument, wrong_type(key, "bool_param"))
        for key in ("sequence_start", "sequence_end", "triton_enable_empty_final_response")
    ),
    (
        with_parameter("priority", string_param="1"),
        InvalidArgument,
        wrong_type("priority", "int64_param or uint64_param"),
    ),
    (with_parameter("timeout", uint64_param=1), InvalidArgument, wrong_type("timeout", "int64_param")),
    *(
        (with_parameter("x", **choice), InvalidArgument, wrong_type("x", "int64_param, bool_param, or string_param"))
        for choice in ({"uint64_param": 1}, {})
    ),
    (
        with_parameter("sequence_id", string_param="x" * 129),
        Unsupported,
        "string correlation ID cannot be longer than 128 characters",
    ),
    *(
        (
            request(tensor(), outputs=[{"name": "OUT", "parameters": parameters}], raw_input_contents=[bytes(8)]),
            kind,
            text,
        )
        for parameters, kind, text in (
            (
                {**REGION, "classification": {"int64_param": 1}},
                InvalidArgument,
                "output can't set both 'shared_memory_region' and 'classification'",
            ),
        )
    ),
    *(
        (request(tensor(parameters=parameters)), kind, text)
        for parameters, kind, text in (
            (
                {**REGION, "shared_memory_offset": {"int64_param": -1}},
                InvalidArgument,
                "invalid value for 'shared_memory_offset' parameter for tensor 'IN', expected >= 0.",
            ),
            (
                {**REGION, "shared_memory_byte_size": {"string_param": "8"}},
                InvalidArgument,
                "invalid value type for 'shared_memory_byte_size' parameter for tensor 'IN', expected int64_param.",
            ),
            (
                {"shared_memory_region": {"string_param": "r"}},
                InvalidArgument,
                "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
                "'IN'",
            ),
            (
                {**REGION, "shared_memory_region": {"int64_param": 3}},
                InvalidArgument,
                "invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected string_param.",
            ),
        )
    ),
]


LONG = "x" * 1025
PLACE = {"shared_memory_region": {"string_param": LONG}, "shared_memory_byte_size": {"int64_param": 8}}


@pytest.mark.parametrize("raw", [[], [bytes(8)]])
@pytest.mark.parametrize(
    ("message", "what"),
    [
        (request(tensor(), id=LONG), "'id'"),
        (ModelInferRequest(model_name=LONG), "'model_name'"),
        (ModelInferRequest(model_version=LONG), "'model_version'"),
        (request(tensor(LONG)), "the name of an input"),
        (request(outputs=[{"name": LONG}]), "the name of an output"),
        (with_parameter(LONG, bool_param=True), "the name of a parameter"),
        (request(tensor(parameters=PLACE)), "'shared_memory_region'"),
        (request(outputs=[{"name": "OUT", "parameters": PLACE}]), "'shared_memory_region'"),
    ],
)
def test_names_that_are_too_long_are_refused(reader: InferReader, message: Any, what: str, raw: list[bytes]) -> None:
    asked = ModelInferRequest()
    asked.CopyFrom(message)
    asked.raw_input_contents.extend(raw)
    with pytest.raises(InvalidArgument) as refused:
        read(reader, asked)
    assert refused.value.message == f"{what} is 1025 characters long, more than the 1024 that are allowed"


def test_the_value_of_a_parameter_may_be_a_grammar(reader: InferReader) -> None:
    assert read(reader, with_parameter("g", string_param="x" * 2**20))[0].parameters["g"] == "x" * 2**20
    with pytest.raises(InvalidArgument, match="parameter 'g' is 1048577 characters long"):
        read(reader, with_parameter("g", string_param="x" * (2**20 + 1)))


@pytest.mark.parametrize(("message", "kind", "text"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_mistakes(reader: InferReader, message: Any, kind: type[NeriteError], text: str) -> None:
    for _ in range(2):
        with pytest.raises(NeriteError) as caught:
            read(reader, message)
        assert (type(caught.value), caught.value.message) == (kind, text)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_raw_only(reader: InferReader, datatype: str) -> None:
    for contents in ({"fp32_contents": [1.0]}, {"uint_contents": [1]}, {}):
        with pytest.raises(
            InvalidArgument, match="unexpected explicit tensor data for input tensor 'IN' for model 'M'"
        ):
            read(reader, request(tensor("IN", datatype, (1,), contents=contents)))
    _, _, (data,) = read(reader, request(tensor("IN", datatype, (1,)), raw_input_contents=[b"ab"]))
    assert data == b"ab"


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reader = InferReader(SenderHeaders({}))
    known = request(tensor(), raw_input_contents=[bytes(8)]).SerializeToString()
    read(reader, known)
    for candidate in (data, known[: len(data)] + data, known + data):
        try:
            header, _, tensors = read(reader, candidate)
        except NeriteError:
            continue
        assert len(tensors) == len(header.inputs)
