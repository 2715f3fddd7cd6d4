"""ONNX models of sequences: controls and states are inputs and outputs that callers know nothing of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from nerite.backends.arrays.calls import ArrayCalls, OutputSelections
from nerite.backends.configuration import TensorPort
from nerite.backends.onnxruntime import OnnxRuntimeBackend
from nerite.config.json_form import from_json
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.scheduling.sequence import RequestSequence
from onnx_models import Opened, context, model, node, save, tensor
from opened import decoded, request


def accumulator(start: int = TensorProto.FLOAT, batch: Any = "N", width: Any = 2, state: Any = 2) -> onnx.ModelProto:
    """OUT = IN + (START ? 0 : BEFORE), AFTER = OUT, TWICE = 2 OUT, ID = C."""
    return model(
        [
            node("Cast", ["START"], ["start"], to=TensorProto.FLOAT),
            node("Mul", ["start", "BEFORE"], ["forgotten"]),
            node("Sub", ["BEFORE", "forgotten"], ["kept"]),
            node("Add", ["IN", "kept"], ["OUT"]),
            node("Identity", ["OUT"], ["AFTER"]),
            node("Add", ["OUT", "OUT"], ["TWICE"]),
            node("Identity", ["C"], ["ID"]),
        ],
        [
            tensor("IN", [batch, width]),
            tensor("START", [batch, 1], start),
            tensor("C", [batch, 1], TensorProto.INT64),
            tensor("BEFORE", [batch, state]),
        ],
        [
            tensor("OUT", [batch, width]),
            tensor("AFTER", [batch, width]),
            tensor("TWICE", [batch, width]),
            tensor("ID", [batch, 1], TensorProto.INT64),
        ],
    )


def config(**changes: Any) -> dict[str, Any]:
    control: dict[str, Any] = changes.pop("control", {"fp32_false_true": [0, 1]})
    state: dict[str, Any] = changes.pop("state", {})
    return {
        "name": "m",
        "max_batch_size": 8,
        "sequence_batching": {
            "control_input": [
                {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", **control}]},
                {"name": "C", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_INT64"}]},
            ],
            "state": [{"input_name": "BEFORE", "output_name": "AFTER", "data_type": "TYPE_FP32", "dims": [2], **state}],
        },
        **changes,
    }


class Sequences:
    """A model and what surrounds it: dressed on the way in, settled on the way out."""

    def __init__(self, folder: Path, proto: onnx.ModelProto, configuration: dict[str, Any]) -> None:
        self.opened = Opened(folder, proto, configuration)
        self.attach = SequenceInputs(from_json(self.opened.config), folder)
        self.alive: dict[int | str, RequestSequence] = {}

    def run(self, *of: tuple[int, Any], start: bool = False, outputs: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        batch = []
        for number, value in of:
            asked = request(outputs, IN=np.array([value], np.float32))
            sequence = self.alive.setdefault(number, RequestSequence(number))
            self.attach.attach(asked, sequence, start=start, end=False)
            batch.append(asked)
        return [
            decoded(self.attach.settle(asked, response, self.alive[number]))
            for (number, _), asked, response in zip(of, batch, self.opened.execute(*batch), strict=True)
        ]


def test_states_and_controls_are_not_for_callers(tmp_path: Path) -> None:
    save(tmp_path, accumulator())
    completed = OnnxRuntimeBackend().complete(context(tmp_path, config()))
    assert [each["name"] for each in completed["input"]] == ["IN"]
    assert [each["name"] for each in completed["output"]] == ["OUT", "TWICE", "ID"]
    assert "dynamic_batching" not in completed


@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_side_by_side(tmp_path: Path, batch: int) -> None:
    sequences = Sequences(tmp_path, accumulator(), config())
    sequences.run(*[(number, [number, 1]) for number in range(batch)], start=True)
    for step in (2, 3):
        answers = sequences.run(*[(number, [number, 1]) for number in range(batch)])
        for number, answer in enumerate(answers):
            assert answer.keys() == {"OUT", "TWICE", "ID"}
            assert answer["OUT"].tolist() == [[step * number, step]]
            assert answer["ID"].tolist() == [[number]]


def test_headers_that_differ_in_the_correlation_id_are_one_call(tmp_path: Path) -> None:
    attach = Sequences(tmp_path, accumulator(), config()).attach
    ports = {
        name: TensorPort(name, datatype, (size,), (size,), batching=True)
        for name, datatype, size in (
            ("IN", dtypes.FP32, 2),
            ("START", dtypes.FP32, 1),
            ("C", dtypes.INT64, 1),
            ("BEFORE", dtypes.FP32, 2),
        )
    }
    headers = []
    for number, width in ((1, 2), (2, 2), (3, 3)):
        asked = request(IN=np.zeros((1, width), np.float32))
        attach.attach(asked, RequestSequence(number), start=True, end=number == 2)
        headers.append(asked.header)
    calls, others = (ArrayCalls(ports, OutputSelections("m", "1", [])) for _ in range(2))
    first, second, wider = map(calls.of, headers)
    assert first is second
    assert first is not wider
    assert others.of(headers[0]) is not first


def test_a_start_begins_anew(tmp_path: Path) -> None:
    sequences = Sequences(tmp_path, accumulator(TensorProto.INT32), config(control={"int32_false_true": [0, 1]}))
    for _ in range(2):
        assert sequences.run((5, [1, 2]), start=True)[0]["OUT"].tolist() == [[1, 2]]
        assert sequences.run((5, [1, 2]))[0]["OUT"].tolist() == [[2, 4]]


def test_the_state_is_kept_whatever_the_caller_asks_for(tmp_path: Path) -> None:
    sequences = Sequences(tmp_path, accumulator(), config())
    sequences.run((5, [1, 2]), start=True, outputs=("ID",))
    (answer,) = sequences.run((5, [1, 2]), outputs=("TWICE",))
    assert {name: array.tolist() for name, array in answer.items()} == {"TWICE": [[4, 8]]}


def test_a_state_may_be_an_output_too(tmp_path: Path) -> None:
    declared = [{"name": "AFTER", "data_type": "TYPE_FP32", "dims": [2]}]
    sequences = Sequences(tmp_path, accumulator(), config(output=declared))
    assert sequences.run((5, [1, 2]), start=True)[0]["AFTER"].tolist() == [[1, 2]]
    assert sequences.run((5, [1, 2]), outputs=("AFTER",))[0]["AFTER"].tolist() == [[2, 4]]


def test_a_state_may_grow(tmp_path: Path) -> None:
    proto = model(
        [node("Concat", ["BEFORE", "IN"], ["AFTER"], axis=1), node("Identity", ["AFTER"], ["OUT"])],
        [tensor("IN", ["N", 1]), tensor("BEFORE", ["N", "T"])],
        [tensor("AFTER", ["N", None]), tensor("OUT", ["N", None])],
    )
    batching = {"state": config(state={"dims": [-1]})["sequence_batching"]["state"]}
    sequences = Sequences(tmp_path, proto, config(sequence_batching=batching))
    sequences.run((5, [1]), start=True)
    assert sequences.run((5, [2]))[0]["OUT"].tolist() == [[0, 1, 2]]


def test_without_batches(tmp_path: Path) -> None:
    proto = model(
        [node("Add", ["IN", "BEFORE"], ["OUT"]), node("Identity", ["OUT"], ["AFTER"])],
        [tensor("IN", [1, 2]), tensor("BEFORE", [1, 2])],
        [tensor("OUT", [1, 2]), tensor("AFTER", [1, 2])],
    )
    batching = {"state": config(state={"dims": [1, 2]})["sequence_batching"]["state"]}
    sequences = Sequences(tmp_path, proto, config(sequence_batching=batching, max_batch_size=0))
    sequences.run((5, [1, 2]), start=True)
    assert sequences.run((5, [1, 2]))[0]["OUT"].tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("changes", "proto", "text"),
    [
        (
            {"control": {"int32_false_true": [0, 1]}},
            accumulator(),
            "unable to load model 'm', sequence control 'START' in model has data-type FP32 but data-type TYPE_INT32 "
            "is expected. Write fp32_false_true: [ 0, 1 ]",
        ),
        (
            {"control": {"int32_false_true": [0, 1]}},
            accumulator(TensorProto.INT64),
            "unable to load model 'm', sequence control 'START' in model has data-type INT64 but data-type TYPE_INT32 "
            "is expected. Export the model with a control of one of: TYPE_INT32, TYPE_FP32, TYPE_BOOL",
        ),
        (
            {"state": {"data_type": "TYPE_INT64"}},
            accumulator(),
            "unable to load model 'm', configuration expects datatype TYPE_INT64 for input state 'BEFORE', model "
            "provides TYPE_FP32. Set data_type: TYPE_FP32",
        ),
        (
            {"state": {"dims": [3]}},
            accumulator(),
            "model 'm', tensor 'BEFORE': the model expects 2 dimensions (shape [-1,2]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,3]). Set dims: [2]",
        ),
        (
            {"state": {"input_name": "NONE"}},
            accumulator(),
            "unexpected inference input 'NONE', allowed inputs are: BEFORE, C, IN, START",
        ),
        (
            {"state": {"output_name": "NONE"}},
            accumulator(),
            "unexpected inference output 'NONE', allowed outputs are: AFTER, ID, OUT, TWICE",
        ),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], proto: onnx.ModelProto, text: str) -> None:
    declared = {
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    with pytest.raises(InvalidArgument) as raised:
        Opened(tmp_path, proto, config(**declared, **changes))
    assert raised.value.message == text


def test_controls_that_the_model_does_not_have_or_has_otherwise(tmp_path: Path) -> None:
    def refusal(proto: onnx.ModelProto, *controls: dict[str, Any]) -> NeriteError:
        with pytest.raises(NeriteError) as raised:
            Opened(tmp_path, proto, config(sequence_batching={"control_input": list(controls)}))
        return raised.value

    def control(name: str, kind: str, **encoding: Any) -> dict[str, Any]:
        return {"name": name, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **encoding}]}

    missing = refusal(accumulator(), control("END", "END", int32_false_true=[0, 1]))
    assert type(missing) is Internal
    assert missing.message == (
        "configuration specified sequence control 'END', but model does not provide that input. The model has: BEFORE, "
        "C, IN, START"
    )
    wide = refusal(accumulator(), control("IN", "READY", fp32_false_true=[0, 1]))
    assert wide.message == (
        "unable to load model 'm', sequence control 'IN' in model has dims [2] but dims [1] is expected"
    )
    other = refusal(accumulator(), control("C", "CORRID", data_type="TYPE_UINT64"))
    assert other.message == (
        "unable to load model 'm', sequence control 'C' in model has data-type INT64 but data-type TYPE_UINT64 is "
        "expected. Write data_type: TYPE_INT64"
    )
