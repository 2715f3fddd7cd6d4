"""Infer requests over HTTP: what they say, and every way to say it wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import HTTP_PLANS
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.access import SenderHeaders
from nerite.transports.http.infer_request import HttpInferReader
from nerite.transports.http.request_bodies import HttpInferPlan

LABEL = "[request id: <id_unknown>] "
IN = {"name": "IN", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]}


@pytest.fixture
def reader() -> HttpInferReader:
    return HttpInferReader("M", "3", SenderHeaders({"x-forwarded": "yes"}), max_size=10_000)


def body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def binary(name: str, size: object, shape: list[int] | None = None, datatype: str = "UINT8") -> dict[str, Any]:
    return {
        "name": name,
        "shape": [size] if shape is None else shape,
        "datatype": datatype,
        "parameters": {"binary_data_size": size},
    }


def bytes_of(plan: HttpInferPlan, raw: bytes = b"") -> list[bytes]:
    return [bytes(each) for each in plan.data(memoryview(raw), 0)]


def with_id(text: bytes, id: bytes) -> bytes:
    """The way that clients write it: first."""
    return b'{"id": "' + id + b'", ' + text[1:]


def test_requests_that_differ_in_their_id_have_one_header(reader: HttpInferReader) -> None:
    asked = body(binary("A", 3))
    plans = [reader.plan(with_id(asked, id)) for id in (b"one", "zwei é".encode(), b"x" * 1024)]
    assert [plan.id for plan in plans] == ["one", "zwei é", "x" * 1024]
    assert len({id(plan.header) for plan in plans}) == 1
    assert [bytes_of(plan, b"xyz") for plan in plans] == [[b"xyz"]] * 3
    plain = reader.plan(asked)
    assert (plain.id, plain.header) == ("", plans[0].header)
    assert plain.repeats and not any(plan.repeats for plan in plans)


BAD_UTF8 = "is not valid UTF-8 at character 1"
TOO_LONG = "is 1025 characters long, more than the 1024 that are allowed"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("id", "told"), [(b"a\xff", BAD_UTF8), (b"x" * 1025, TOO_LONG)])
def test_an_id_that_is_no_text_is_refused(reader: HttpInferReader, known: bool, id: bytes, told: str) -> None:
    """Whether the rest was seen before or not."""
    asked = body(binary("A", 3))
    if known:
        reader.plan(with_id(asked, b"one"))
    with pytest.raises(InvalidArgument, match=f"'id' {told}"):
        reader.plan(with_id(asked, id))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (body({**IN, "name": "a?"}), "inputs[0].name"),
        (body({**IN, "datatype": "a?"}), "inputs[0].datatype"),
        (body({**IN, "parameters": {"anything": ["a?"]}}), "inputs[0].parameters.anything[0]"),
        (body(IN, parameters={"sequence_id": "a?"}), "parameters.sequence_id"),
        (body(IN, parameters={"text": "a?"}), "parameters.text"),
        (body(IN, outputs=[{"name": "a?"}]), "outputs[0].name"),
        (body(IN, unknown={"deep": [{"x": "a?"}]}), "unknown.deep[0].x"),
        (body(IN, data="a?"), "data"),
    ],
)
def test_text_that_is_not_utf8_is_refused_wherever_it_is(reader: HttpInferReader, text: bytes, where: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        reader.plan(text.replace(b"?", b"\xff"))
    assert refused.value.message.startswith(f"member '{where}' {BAD_UTF8}")


def test_data_of_bytes_tensors_may_be_any_bytes(reader: HttpInferReader) -> None:
    text = body({"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["a?"]}, id="me")
    assert bytes_of(reader.plan(text.replace(b"?", b"\xff"))) == [join_bytes([b"a\xff"])]


LONG = "x" * 1025


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (body({**IN, "name": LONG}), "the name of an input"),
        (body(IN, outputs=[{"name": LONG}]), "the name of an output"),
        (body(IN, parameters={LONG: 1}), "the name of a parameter"),
        (body({**binary("A", 1), "parameters": {"shared_memory_region": LONG}}), "'shared_memory_region'"),
    ],
)
def test_names_that_are_too_long_are_refused(reader: HttpInferReader, text: bytes, what: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        reader.plan(text)
    assert refused.value.message == f"{what} {TOO_LONG}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (body(*[IN] * 1025), "'inputs' has 1025 entries, more than the 1024 that a request may have"),
        (body(IN, outputs=[{"name": "X"}] * 1025), "'outputs' has 1025 entries, more than the 1024 "),
        (body(IN, parameters={str(n): n for n in range(1025)}), "'parameters' has 1025 entries, more than the 1024 "),
        (body({**IN, "shape": [1] * 65}), "'shape' of input 'IN' has 65 entries, more than the 64 that a tensor may"),
    ],
)
def test_there_may_be_so_many_of_anything_and_no_more(reader: HttpInferReader, text: bytes, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        reader.plan(text)
    assert refused.value.message.startswith(told)


def test_a_model_may_have_more_inputs_than_is_usual() -> None:
    wide = HttpInferReader("M", "", SenderHeaders({}), 10_000, most=lambda: 1100)
    asked = [{**IN, "name": f"IN{number}"} for number in range(1101)]
    assert len(wide.plan(body(*asked[:1100], outputs=[{"name": "X"}] * 1100)).header.inputs) == 1100
    with pytest.raises(InvalidArgument, match="'inputs' has 1101 entries, more than the 1100 that a request may have"):
        wide.plan(body(*asked))


def test_the_value_of_a_parameter_may_be_a_grammar(reader: HttpInferReader) -> None:
    asked = body(IN, parameters={"grammar": "x" * 2**20})
    assert reader.plan(asked).header.parameters["grammar"] == "x" * 2**20
    with pytest.raises(InvalidArgument, match="parameter 'grammar' is 1048577 characters long"):
        reader.plan(body(IN, parameters={"grammar": "x" * (2**20 + 1)}))


def test_an_id_is_not_taken_from_what_is_no_json(reader: HttpInferReader) -> None:
    asked = body(binary("A", 3))
    reader.plan(with_id(asked, b"one"))
    for text in (b'{"id": "one", }', with_id(asked, b"\n"), with_id(asked[:-1], b"one")):
        with pytest.raises(Internal, match="failed to parse the request JSON buffer"):
            reader.plan(text)


def test_of_several_ids_the_last_one_counts(reader: HttpInferReader) -> None:
    asked = body(binary("A", 3), id="last")
    assert [reader.plan(with_id(asked, id)).id for id in (b"one", b"two")] == ["last", "last"]
    assert reader.plan(with_id(body(binary("A", 3)), rb"a\u00e9")).id == "a\u00e9"


def test_data_in_the_json_is_read_each_time(reader: HttpInferReader) -> None:
    first = reader.plan(with_id(body(IN), b"one"))
    second = reader.plan(with_id(body({**IN, "data": [3, 4]}), b"two"))
    again = reader.plan(with_id(body(IN), b"three"))
    assert [np.frombuffer(bytes_of(plan)[0], np.int32).tolist() for plan in (first, second, again)] == [
        [1, 2],
        [3, 4],
        [1, 2],
    ]


def test_everything_a_request_can_say(reader: HttpInferReader) -> None:
    plan = reader.plan(
        body(
            IN,
            id="seven",
            parameters={
                "sequence_id": 5,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 2,
                "timeout": 1000,
                "binary_data_output": True,
                "text": "x",
                "flag": True,
                "number": 7,
                "half": 0.5,
            },
            outputs=[
                {"name": "A"},
                {"name": "B", "parameters": {"binary_data": True}},
                {"name": "C", "parameters": {"classification": 3, "other": 1}},
                {"name": "D", "parameters": {"base64": True}},
            ],
        )
    )
    header = plan.header
    assert plan.id == "seven"
    assert (header.model_name, header.model_version) == ("M", "3")
    assert header.inputs == (TensorSpec("IN", dtypes.INT32, (1, 2)),)
    assert [(each.name, each.binary, each.classification, each.base64) for each in header.outputs] == [
        ("A", False, 0, False),
        ("B", True, 0, False),
        ("C", False, 3, False),
        ("D", False, 0, True),
    ]
    assert header.parameters == {"text": "x", "flag": True, "number": 7, "half": 0.5, "x-forwarded": "yes"}
    assert (header.priority, header.timeout_us, header.binary_by_default) == (2, 1000, True)
    assert (header.sequence_id, header.sequence_start, header.sequence_end) == (5, True, False)
    assert bytes_of(plan) == [np.array([1, 2], np.int32).tobytes()]
    assert plan.size == 0


def test_the_least_a_request_can_say(reader: HttpInferReader) -> None:
    plan = reader.plan(b'{"inputs":[]}')
    header = plan.header
    assert (plan.id, header.inputs, header.outputs) == ("", (), ())
    assert (header.priority, header.timeout_us, header.binary_by_default) == (0, 0, False)
    assert (header.sequence_id, header.sequence_start, header.sequence_end) == (0, False, False)


def test_binary_data_is_in_the_order_of_the_inputs(reader: HttpInferReader) -> None:
    plan = reader.plan(body(binary("A", 3), IN, binary("B", 0), binary("C", 2)))
    assert plan.size == 5
    assert bytes_of(plan, b"abcde") == [b"abc", np.array([1, 2], np.int32).tobytes(), b"", b"de"]
    data = plan.data(memoryview(b"{...}abcde"), 5)
    assert next(bytes(each) for each in data) == b"abc"


def test_a_sequence_may_be_called_by_a_text(reader: HttpInferReader) -> None:
    assert reader.plan(body(IN, parameters={"sequence_id": "x" * 128})).header.sequence_id == "x" * 128
    assert reader.plan(body(IN, parameters={"sequence_id": 2**64 - 1})).header.sequence_id == 2**64 - 1


def test_a_text_seen_before_is_the_same_plan(reader: HttpInferReader) -> None:
    text = body(binary("A", 3))
    assert reader.plan(text) is reader.plan(text)


def test_what_is_different_each_time_is_not_kept(reader: HttpInferReader) -> None:
    for text in (body(IN), body(binary("A", 3), id="1"), body(binary("A", 3), outputs=[{"name": "A" * 1000}] * 200)):
        assert reader.plan(text) is not reader.plan(text)


def test_requests_that_say_the_same_have_one_header(reader: HttpInferReader) -> None:
    headers = {
        id(reader.plan(text).header)
        for text in (
            body(IN),
            body({**IN, "data": [3, 4]}),
            body(IN, id="1"),
            body({**IN, "data": [[3, 4]]}, parameters={}),
            body(binary("IN", 8, [1, 2], "INT32")),
        )
    }
    assert len(headers) == 1


def test_what_an_answer_looks_like_is_part_of_what_is_asked(reader: HttpInferReader) -> None:
    """Whatever is remembered of one request must not be the answer to the other."""
    ways: list[dict[str, Any]] = [
        {},
        {"parameters": {"base64_output": True}},
        {"outputs": [{"name": "O"}]},
        {"outputs": [{"name": "O", "parameters": {"base64": True}}]},
        {"outputs": [{"name": "O", "parameters": {"binary_data": True}}]},
    ]
    headers = [reader.plan(body(binary("A", 3), **way)).header for way in ways]
    assert len({id(header) for header in headers}) == len(ways)
    assert [header.base64_by_default for header in headers] == [False, True, False, False, False]
    assert all(header.parameters == {"x-forwarded": "yes"} for header in headers)


def test_half_precision_where_it_is_allowed() -> None:
    text = body({"name": "IN", "shape": [2], "datatype": "FP16", "data": [1.5, -2]})
    assert bytes_of(HttpInferReader("M", "", SenderHeaders({}), max_size=100, half=True).plan(text)) == [
        np.array([1.5, -2], "<f2").tobytes()
    ]
    with pytest.raises(InvalidArgument, match="receiving FP16 data via JSON is not supported"):
        HttpInferReader("M", "", SenderHeaders({}), max_size=100).plan(text)


def test_values_that_python_calls_equal_are_kept_apart(reader: HttpInferReader) -> None:
    values = [
        reader.plan(body(IN, parameters={"value": value})).header.parameters["value"] for value in (1, True, 1.0, "1")
    ]
    assert [type(value) for value in values] == [int, bool, float, str]


def test_numbers_beyond_a_signed_integer_are_floats(reader: HttpInferReader) -> None:
    parameters = {"largest": 2**63 - 1, "larger": 2**63, "beyond": 2**64}
    told = reader.plan(body(IN, parameters=parameters)).header.parameters
    assert [told[key] for key in parameters] == [2**63 - 1, 2.0**63, 2.0**64]
    assert [type(told[key]) for key in parameters] == [int, float, float]


def test_what_all_readers_keep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HTTP_PLANS, "limit", 256 * 1024)
    readers = [HttpInferReader(str(number), "", SenderHeaders({}), 1_000_000) for number in range(10)]
    bodies = [body(binary("A", 1), parameters={"number": number}) for number in range(500)]
    plans = []
    for number in range(500):
        plans.append(readers[number % 10].plan(bodies[number]))
        assert HTTP_PLANS.used <= HTTP_PLANS.limit
    assert readers[9].plan(bodies[499]) is plans[499]
    for number in range(10):
        again = readers[number].plan(bodies[number])
        assert again is not plans[number] and again.header is not plans[number].header


ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)
NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_BOOLEAN = "attempt to access JSON non-boolean as boolean"
MISTAKES: list[tuple[bytes, type[NeriteError], str]] = [
    *(
        (
            wrong,
            Internal,
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs' (the body of an "
            'inference is an object such as {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], '
            '"data": [1.5, 2.5]}]})',
        )
        for wrong in (b"[]", b"{}")
    ),
    (b'{"inputs":{}}', Internal, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    (b'{"inputs":null}', Internal, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    (body(IN, id=5), Internal, "Unable to parse 'id': attempt to access JSON non-string as string"),
    (body(IN, id=None), Internal, "Unable to parse 'id': attempt to access JSON non-string as string"),
    *(
        (body(IN, parameters=wrong), Internal, "failed to get request params.: attempt to get members for non-object")
        for wrong in (5, [], "x", None)
    ),
    *(
        (body(IN, outputs=wrong), Internal, "Unable to parse 'outputs': attempt to access JSON non-array as array")
        for wrong in ({}, None, "OUT", 1)
    ),
    *(
        (body(wrong), InvalidArgument, ONE_SOURCE + "But no field is set")
        for wrong in (1, "IN", None, [], {}, {"name": "IN", "shape": [1], "datatype": "INT32"})
    ),
    (
        body({**IN, "parameters": {"binary_data_size": 8}}),
        InvalidArgument,
        ONE_SOURCE + "But set 'data' 'binary_data_size'",
    ),
    (
        body({**IN, "parameters": {"binary_data_size": 8, "shared_memory_region": "r"}}),
        InvalidArgument,
        ONE_SOURCE + "But set 'data' 'binary_data_size' 'shared_memory_region'",
    ),
    *(
        (
            body({**binary("IN", 8), "parameters": {"shared_memory_region": "r", name: -1}}),
            Internal,
            f"Unable to parse '{name}': {NOT_UNSIGNED}",
        )
        for name in ("shared_memory_offset", "shared_memory_byte_size")
    ),
    (
        body({**binary("IN", 8), "parameters": {"shared_memory_region": 3}}),
        Internal,
        "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string",
    ),
    *(
        (body(binary("IN", wrong, [1])), Internal, f"Unable to parse 'binary_data_size': {NOT_UNSIGNED}")
        for wrong in (-1, "8", 1.5, True, None)
    ),
    *(
        (
            body({key: value for key, value in IN.items() if key != missing}),
            Internal,
            f"Unable to parse '{missing}': attempt to access non-existing object member '{missing}'",
        )
        for missing in ("name", "shape", "datatype")
    ),
    (body({**IN, "name": 1}), Internal, "Unable to parse 'name': attempt to access JSON non-string as string"),
    (body({**IN, "datatype": 1}), Internal, "Unable to parse 'datatype': attempt to access JSON non-string as string"),
    (body({**IN, "shape": 2}), Internal, "Unable to parse 'shape': attempt to access JSON non-array as array"),
    *(
        (body({**IN, "shape": [1, wrong]}), Internal, f"Unable to parse 'shape': {NOT_UNSIGNED}")
        for wrong in (-1, 2.0, "2", True, None, [2], 2**64)
    ),
    *(
        (body({**IN, "datatype": wrong}), InvalidArgument, "invalid datatype for input IN")
        for wrong in ("INT31", "int32", "", "STRING")
    ),
    (
        body(IN, outputs=["OUT"]),
        Internal,
        "Unable to parse 'name': attempt to access non-existing object member 'name'",
    ),
    (body(IN, outputs=[{}]), Internal, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
    (body(IN, outputs=[{"name": 3}]), Internal, "Unable to parse 'name': attempt to access JSON non-string as string"),
    *(
        (
            body(IN, outputs=[{"name": "O", "parameters": {"classification": wrong}}]),
            Internal,
            f"Unable to set 'classification': {NOT_UNSIGNED}",
        )
        for wrong in (-1, "2", 1.5, True)
    ),
    *(
        (
            body(IN, outputs=[{"name": "O", "parameters": {name: wrong}}]),
            Internal,
            f"Unable to parse '{name}': {NOT_BOOLEAN}",
        )
        for name in ("binary_data", "base64")
        for wrong in (1, "true", None)
    ),
    *(
        (
            body(IN, outputs=[{"name": "O", "parameters": {"shared_memory_region": "r", option: value}}]),
            InvalidArgument,
            f"Output can't set both 'shared_memory_region' and '{option}'",
        )
        for option, value in (("classification", 0), ("binary_data", True), ("base64", True))
    ),
    (
        body(IN, outputs=[{"name": "O", "parameters": {"binary_data": True, "base64": True}}]),
        InvalidArgument,
        "Output can't set both 'binary_data' and 'base64'",
    ),
    (
        body(IN, parameters={"binary_data_output": True, "base64_output": True}),
        InvalidArgument,
        "Request can't set both 'binary_data_output' and 'base64_output'",
    ),
    *(
        (body(IN, parameters={key: wrong}), Internal, f"Unable to parse '{key}': {NOT_UNSIGNED}")
        for key in ("priority", "timeout")
        for wrong in (-1, "1", 1.5, True, None)
    ),
    *(
        (body(IN, parameters={key: wrong}), Internal, f"Unable to parse '{key}': {NOT_BOOLEAN}")
        for key in ("sequence_start", "sequence_end", "binary_data_output", "base64_output")
        for wrong in (1, "x", None)
    ),
    *(
        (
            body(IN, parameters={"sequence_id": wrong}),
            Internal,
            "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
        )
        for wrong in (-1, 1.5, True, None, [1], {})
    ),
    (
        body(IN, parameters={"sequence_id": "x" * 129}),
        Unsupported,
        "string correlation ID cannot be longer than 128 characters",
    ),
    (
        body(IN, parameters={"triton_x": 1}),
        InvalidArgument,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    *(
        (
            body(IN, parameters={"x": wrong}),
            InvalidArgument,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        )
        for wrong in (None, [], {})
    ),
    (
        body({**IN, "shape": [1, 100_000]}),
        InvalidArgument,
        "JSON input 'IN' has a byte_size (400000 bytes) that exceeds the maximum allowed value of 10000 bytes. "
        "Use --http-max-input-size to increase the limit.",
    ),
    (
        body(binary("IN", 8, [2**32, 2**32])),
        InvalidArgument,
        "invalid shape for input 'IN': shape [4294967296,4294967296] causes total element count to exceed maximum size "
        "of 9223372036854775807",
    ),
    (
        body({**IN, "data": [1, 2, 3]}),
        Internal,
        "Unable to parse 'data': Shape does not match true shape of 'data' field (input 'IN' has 3 values, and its "
        "shape [1,2] needs 2)",
    ),
]


@pytest.mark.parametrize(("text", "kind", "message"), MISTAKES, ids=[text.decode()[:60] for text, _, _ in MISTAKES])
def test_mistakes(reader: HttpInferReader, text: bytes, kind: type[NeriteError], message: str) -> None:
    for _ in range(2):
        with pytest.raises(NeriteError) as caught:
            reader.plan(text)
        assert (type(caught.value), caught.value.message) == (kind, message)


@pytest.mark.parametrize("wrong", [5, "binary_data_size", [1], None, True])
def test_parameters_of_tensors_that_are_no_objects_say_nothing(reader: HttpInferReader, wrong: object) -> None:
    plan = reader.plan(body({**IN, "parameters": wrong}, outputs=[{"name": "O", "parameters": wrong}]))
    assert [(each.binary, each.classification) for each in plan.header.outputs] == [(False, 0)]


# Raw binary requests


def raw(declared: SignatureInput, data: bytes, batch: int = 0) -> tuple[TensorSpec, list[bytes]]:
    reader = HttpInferReader("M", "", SenderHeaders({"x-forwarded": "yes"}), max_size=10_000)
    plan = reader.raw(Signature("M", batch, [declared], []), memoryview(data))
    assert plan.header.binary_by_default
    assert plan.header.parameters == {"x-forwarded": "yes"}
    assert plan.size == len(data)
    return plan.header.inputs[0], [bytes(each) for each in plan.data(memoryview(data), 0)]


@pytest.mark.parametrize(
    ("dims", "batch", "elements", "shape"),
    [
        ((4,), 0, 4, (4,)),
        ((-1,), 0, 6, (6,)),
        ((2, -1), 0, 6, (2, 3)),
        ((-1, 2), 8, 6, (1, 3, 2)),
        ((4,), 8, 4, (1, 4)),
        ((), 8, 1, (1,)),
    ],
)
def test_the_shape_of_raw_bytes_is_deduced(
    dims: tuple[int, ...], batch: int, elements: int, shape: tuple[int, ...]
) -> None:
    data = bytes(range(elements * 4))
    assert raw(SignatureInput("IN", dtypes.FP32, dims), data, batch) == (TensorSpec("IN", dtypes.FP32, shape), [data])


def test_raw_text_is_one_element() -> None:
    spec, data = raw(SignatureInput("IN", dtypes.BYTES, (1,)), b"hello", 8)
    assert (spec, data) == (TensorSpec("IN", dtypes.BYTES, (1, 1)), [join_bytes([b"hello"])])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            [SignatureInput(name, dtypes.FP32, (1,)) for name in "ABC"],
            "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in 'M' model configuration",
        ),
        (
            [SignatureInput("IN", dtypes.BYTES, (2,))],
            "For BYTE datatype raw input 'IN', the model must have input shape [1]",
        ),
        (
            [SignatureInput("IN", dtypes.FP32, (-1, -1))],
            "The shape of the raw input 'IN' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (
            [SignatureInput("IN", dtypes.FP32, (3,))],
            "input byte size mismatch for input 'raw_input' for model 'M'. Expected 12, got 8 (a body that is empty, "
            "or whose Inference-Header-Content-Length is 0, is the data of 'IN' without any JSON)",
        ),
    ],
)
def test_raw_bytes_that_cannot_be_understood(
    reader: HttpInferReader, inputs: list[SignatureInput], message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        reader.raw(Signature("M", 0, inputs, []), memoryview(b"12345678"))
    assert caught.value.message == LABEL + message


# Anything

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["name", "shape", "datatype", "data", "parameters", "binary_data_size", "classification", "binary_data"]
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "inputs": st.lists(st.dictionaries(KEYS, VALUES, max_size=5) | st.just(IN), max_size=3) | VALUES,
        "outputs": st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=2) | VALUES,
        "parameters": st.dictionaries(st.sampled_from(["sequence_id", "priority", "timeout", "x"]), VALUES) | VALUES,
    },
)


@given(DOCUMENTS | VALUES)
def test_any_document_is_a_plan_or_refused(document: object) -> None:
    reader = HttpInferReader("M", "", SenderHeaders({}), max_size=10_000)
    try:
        plan = reader.plan(json.dumps(document).encode())
    except NeriteError as error:
        assert error.message.encode()
        return
    assert len(plan.places) == len(plan.header.inputs)
    assert hash(plan.header.identity())
