from __future__ import annotations

import gc
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from doubles import Caller
from nerite.config.model_config import ModelConfig, ModelOutput, ModelSequenceBatching
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import Internal
from nerite.core.request import Caller as Tenant
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec
from nerite.dispatch import sequence_inputs
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.scheduling.sequence import RequestSequence


def control(name: str, kind: str, **encoding: Any) -> ModelSequenceBatching.ControlInput:
    made: Any = {"kind": f"CONTROL_SEQUENCE_{kind}", **encoding}
    return ModelSequenceBatching.ControlInput(name=name, control=(ModelSequenceBatching.Control(**made),))


def attach(
    *controls: ModelSequenceBatching.ControlInput,
    states: tuple[ModelSequenceBatching.State, ...] = (),
    rows: int = 4,
    outputs: tuple[str, ...] = (),
    folder: Path = Path(),
) -> SequenceInputs:
    return SequenceInputs(
        ModelConfig(
            max_batch_size=rows,
            output=tuple(ModelOutput(name=name, data_type="TYPE_INT32", dims=(1,)) for name in outputs),
            sequence_batching=ModelSequenceBatching(control_input=controls, state=states),
        ),
        folder,
    )


def header(*wanted: str) -> RequestHeader:
    return RequestHeader("m", "", [TensorSpec("IN", dtypes.INT32, (1, 2))], [RequestedOutput(name) for name in wanted])


def request(of: RequestHeader | None = None) -> InferenceRequest:
    return InferenceRequest(of or header(), [struct.pack("<2i", 7, 8)], Caller(), 0)


def values(attached: InferenceRequest) -> dict[str, bytes]:
    return {spec.name: bytes(data) for spec, data in zip(attached.header.inputs, attached.data, strict=True)}


def answer(*outputs: tuple[str, tuple[int, ...], bytes]) -> InferenceResponse:
    specs = [TensorSpec(name, dtypes.INT32, shape) for name, shape, _ in outputs]
    return InferenceResponse(ResponseHeader("m", "1", specs), [data for _, _, data in outputs])


ALL = (
    control("S", "START", int32_false_true=(0, 1)),
    control("E", "END", fp32_false_true=(-1.0, 2.5)),
    control("R", "READY", bool_false_true=(False, True)),
    control("C", "CORRID", data_type="TYPE_UINT64"),
)


def test_controls() -> None:
    asked = request()
    attach(*ALL).attach(asked, RequestSequence(42), start=True, end=False)
    assert [(spec.name, spec.datatype.name, spec.shape) for spec in asked.header.inputs] == [
        ("IN", "INT32", (1, 2)),
        ("S", "INT32", (1, 1)),
        ("E", "FP32", (1, 1)),
        ("R", "BOOL", (1, 1)),
        ("C", "UINT64", (1, 1)),
    ]
    assert values(asked) == {
        "IN": struct.pack("<2i", 7, 8),
        "S": struct.pack("<i", 1),
        "E": struct.pack("<f", -1),
        "R": b"\1",
        "C": struct.pack("<Q", 42),
    }
    assert [*map(len, asked.data)] == asked.header.sizes


def test_without_a_batch_dimension() -> None:
    asked = request()
    attach(*ALL, rows=0).attach(asked, RequestSequence(42), start=False, end=True)
    assert [spec.shape for spec in asked.header.inputs] == [(1, 2), (1,), (1,), (1,), (1,)]
    assert values(asked)["S"] == struct.pack("<i", 0)
    assert values(asked)["E"] == struct.pack("<f", 2.5)


@pytest.mark.parametrize(
    ("datatype", "id", "expected"),
    [
        ("UINT64", 2**64 - 1, bytes([255] * 8)),
        ("INT64", 2**64 - 1, struct.pack("<q", -1)),
        ("UINT32", 2**32 + 5, struct.pack("<I", 5)),
        ("INT32", 2**31, struct.pack("<i", -(2**31))),
        ("STRING", "täg", b"\4\0\0\0t\xc3\xa4g"),
    ],
)
def test_correlation_id(datatype: str, id: int | str, expected: bytes) -> None:
    asked = request()
    attach(control("C", "CORRID", data_type=f"TYPE_{datatype}")).attach(
        asked, RequestSequence(id), start=False, end=False
    )
    assert values(asked)["C"] == expected


def test_the_model_is_told_what_the_server_decided() -> None:
    asked = request()
    attach().attach(asked, RequestSequence(9), start=True, end=False)
    assert (asked.header.sequence_id, asked.header.sequence_start, asked.header.sequence_end) == (9, True, False)


def test_equal_headers_are_one_object() -> None:
    clothes, caller = attach(*ALL), header()
    sequence = RequestSequence(3)
    made = []
    for start in (True, False, False):
        asked = request(caller)
        clothes.attach(asked, sequence, start=start, end=False)
        made.append(asked.header)
    assert made[0] is not made[1]
    assert made[1] is made[2]


def test_what_is_remembered_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new callers, correlation ids and states: each is dressed as it should be, and little is kept."""
    budget = ByteBudget("test", 256 * 1024)
    monkeypatch.setattr(sequence_inputs, "SEQUENCES", budget)
    clothes = attach(*ALL, states=(STATE,))
    callers = [header() for _ in range(200)]
    first_headers = []
    for number in range(1, 200):
        sequence = RequestSequence(number)
        for start in (True, False):
            asked = request(callers[number])
            clothes.attach(asked, sequence, start=start, end=False)
            assert asked.header.inputs[-1].shape == (1, 1 if start else number)
            if start:
                first_headers.append(asked.header)
            given = answer(("OUT", (1, 1), bytes(4)), ("SO", (1, number), bytes(4 * number)))
            rest = clothes.settle(asked, given, sequence)
            assert rest.header is not None and [spec.name for spec in rest.header.outputs] == ["OUT"]
        assert budget.used <= budget.limit
    assert budget.evictions > 100

    def again(number: int) -> RequestHeader:
        asked = request(callers[number])
        clothes.attach(asked, RequestSequence(number), start=True, end=False)
        return asked.header

    assert again(199) is first_headers[-1]
    assert again(1) is not first_headers[0]


def test_the_header_of_a_large_request_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 1024 * 1024)
    monkeypatch.setattr(sequence_inputs, "SEQUENCES", budget)
    asked = request(RequestHeader("m", "", [TensorSpec("IN", dtypes.INT32, (1, 2))], parameters={"a": "x" * 200_000}))
    attach(*ALL).attach(asked, RequestSequence(1), start=True, end=False)
    assert asked.header.parameters["a"] == "x" * 200_000
    assert budget.used == 0


def test_what_is_remembered_takes_no_more_memory_than_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 1 << 30)
    monkeypatch.setattr(sequence_inputs, "SEQUENCES", budget)
    clothes = attach(*ALL, states=(STATE,))

    def go(number: int) -> None:
        caller = RequestHeader(f"m{number}", "", [TensorSpec("IN", dtypes.INT32, (300 + number, 2))])
        asked, sequence = request(caller), RequestSequence(number)
        clothes.attach(asked, sequence, start=True, end=False)
        clothes.null(asked)
        clothes.settle(asked, answer(("OUT", (300 + number, 1), b""), ("SO", (1, 300 + number), b"")), sequence)

    for number in range(10):
        go(number)
    gc.collect()
    before = budget.used
    tracemalloc.start()
    try:
        for number in range(10, 110):
            go(number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = budget.used - before
    assert counted / 8 <= taken <= counted


def test_a_slot_without_a_request() -> None:
    clothes = attach(
        *ALL,
        control("C2", "CORRID", data_type="TYPE_STRING"),
        states=(ModelSequenceBatching.State(input_name="SI", output_name="SO", data_type="TYPE_INT32", dims=(2,)),),
    )
    asked = request()
    clothes.attach(asked, RequestSequence(3), start=True, end=True)
    null = clothes.null(asked)
    assert null.header.inputs == asked.header.inputs
    assert (null.header.sequence_id, null.header.sequence_start, null.header.sequence_end) == (0, False, False)
    assert values(null) == {
        "IN": bytes(8),
        "S": bytes(4),
        "E": struct.pack("<f", -1),
        "R": b"\0",
        "C": bytes(8),
        "C2": bytes(4),
        "SI": bytes(8),
    }
    assert clothes.null(asked).header is null.header
    null.respond(answer(("OUT", (1, 1), bytes(4))))


STATE = ModelSequenceBatching.State(input_name="SI", output_name="SO", data_type="TYPE_INT32", dims=(-1,))


def test_a_state_goes_from_request_to_request() -> None:
    clothes, sequence = attach(states=(STATE,)), RequestSequence(1)
    first = request()
    clothes.attach(first, sequence, start=True, end=False)
    assert first.header.inputs[-1] == TensorSpec("SI", dtypes.INT32, (1, 1))
    assert values(first)["SI"] == bytes(4)
    kept = bytes(range(200)) * 80
    got = clothes.settle(first, answer(("OUT", (1, 1), b"abcd"), ("SO", (1, 4000), kept)), sequence)
    assert got.header is not None
    assert [spec.name for spec in got.header.outputs] == ["OUT"]
    assert got.data == [b"abcd"]
    second = request()
    clothes.attach(second, sequence, start=False, end=False)
    assert second.header.inputs[-1] == TensorSpec("SI", dtypes.INT32, (1, 4000))
    assert second.data[-1] is kept
    assert second.header.batch_key != first.header.batch_key


def test_a_start_forgets_the_state() -> None:
    clothes, sequence = attach(states=(STATE,)), RequestSequence(1)
    for _ in range(2):
        asked = request()
        clothes.attach(asked, sequence, start=True, end=False)
        assert values(asked)["SI"] == bytes(4)
        asked.data[-1][:] = b"dirt"  # type: ignore[index]  # a model that works in place
        clothes.settle(asked, answer(("SO", (1, 1), b"dirt")), sequence)


def test_a_response_after_the_end_of_its_sequence() -> None:
    clothes, sequence = attach(states=(STATE,)), RequestSequence(1)
    clothes.attach(asked := request(), sequence, start=True, end=True)
    sequence.state = None
    rest = clothes.settle(asked, answer(("OUT", (1, 1), b"abcd"), ("SO", (1, 1), b"efgh")), sequence)
    assert rest.header is not None
    assert [spec.name for spec in rest.header.outputs] == ["OUT"]


def test_what_a_model_leaves_out_stays() -> None:
    other = ModelSequenceBatching.State(input_name="TI", output_name="TO", data_type="TYPE_INT32", dims=(1,))
    clothes, sequence = attach(states=(STATE, other)), RequestSequence(1)
    asked = request()
    clothes.attach(asked, sequence, start=True, end=False)
    clothes.settle(asked, answer(("TO", (1, 1), b"1234"), ("SO", (1, 1), b"abcd")), sequence)
    clothes.settle(asked, answer(("TO", (1, 1), b"5678")), sequence)
    failed = InferenceResponse.failed(Internal("no"))
    assert clothes.settle(asked, failed, sequence) is failed
    clothes.attach(asked := request(), sequence, start=False, end=False)
    assert values(asked) | {"SI": b"abcd", "TI": b"5678"} == values(asked)


@pytest.mark.parametrize(
    ("wanted", "asked_for", "answered"),
    [((), [], ["OUT", "SO"]), (("OUT",), ["OUT", "SO"], ["OUT"]), (("SO",), ["SO"], ["SO"])],
)
def test_a_state_that_is_an_output_too(wanted: tuple[str, ...], asked_for: list[str], answered: list[str]) -> None:
    clothes, sequence = attach(states=(STATE,), outputs=("OUT", "SO")), RequestSequence(1)
    asked = request(header(*wanted))
    clothes.attach(asked, sequence, start=True, end=False)
    assert [output.name for output in asked.header.outputs] == asked_for
    everything = [("OUT", (1, 1), b"abcd"), ("SO", (1, 1), b"efgh")]
    given = answer(*(each for each in everything if not wanted or each[0] in asked.header.wanted))
    got = clothes.settle(asked, given, sequence)
    assert got.header is not None
    assert [spec.name for spec in got.header.outputs] == answered
    assert clothes.settle(asked, given, sequence).header is got.header


def test_a_attached_request_has_its_caller() -> None:
    asked = request(header().changed(caller=Tenant("acme")))
    made = attach(control("START", "START", int32_false_true=(0, 1)))
    made.attach(asked, RequestSequence(4), start=True, end=False)
    assert asked.header.caller == Tenant("acme")
    made.overrule(asked, {})
    assert asked.header.caller == Tenant("acme")
