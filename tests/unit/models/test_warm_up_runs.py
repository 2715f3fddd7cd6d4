"""Samples that warm up a model with sequences: what they carry, and what they leave."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from doubles import Caller
from nerite.config.text import parse_text
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import Reschedule, ResponseHeader
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import TensorSpec
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.instances.instance import Batch
from nerite.models.warm_up import WarmUpRun, WarmUpSample, configured_samples, recorded_samples, warm_up_mistakes
from nerite.transports.http import infer_request

CONFIG = """
name: "m" backend: "python" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ -1 ] }
}
"""
SIGNATURE = Signature("m", 4, [SignatureInput("IN", dtypes.INT32, (1,))], [])


def sample(folder: Path, *inputs: str, rows: int = 1) -> WarmUpSample:
    (one,) = configured_samples(
        parse_text(CONFIG + warm_up(*inputs, rows=rows), "config.pbtxt").config, SIGNATURE, folder, print
    )
    return one


def warm_up(*inputs: str, rows: int = 1) -> str:
    """Text of a sample. Each of ``inputs`` is a name, type and size."""
    tensors = ""
    for each in ("IN INT32 1", *inputs):
        name, data_type, size = each.split()
        tensors += f'inputs {{ key: "{name}" value {{ data_type: TYPE_{data_type} dims: {size} zero_data: true }} }} '
    return f'model_warmup {{ name: "s" batch_size: {rows} {tensors} }}'


def warm_up_run(*, iterative: bool = False) -> WarmUpRun:
    return WarmUpRun(SequenceInputs(parse_text(CONFIG, "config.pbtxt").config, Path()), iterative=iterative)


def seen(batch: Batch) -> list[dict[str, Any]]:
    """What the model finds in each request: the numbers of each input."""
    return [
        {
            spec.name: struct.unpack(f"<{len(data) // 4}i", data)
            for spec, data in zip(request.header.inputs, request.data, strict=True)
        }
        for request in batch
    ]


def leave(of: WarmUpRun, request: InferenceRequest, *state: int) -> None:
    """Have the model want a request once more, and leave a state."""
    spec = TensorSpec("AFTER", dtypes.INT32, (1, len(state)))
    of.settle(request, Reschedule(ResponseHeader("m", "1", [spec]), [struct.pack(f"<{len(state)}i", *state)]))


def test_each_row_is_a_sequence_of_one_request(tmp_path: Path) -> None:
    batch = warm_up_run().begin(sample(tmp_path, rows=2).requests(Caller(), 0), {})
    whole = {"IN": (0,), "START": (1,), "END": (1,), "READY": (1,), "BEFORE": (0,)}
    assert seen(batch) == [{**whole, "ID": (1,)}, {**whole, "ID": (2,)}]
    assert [(each.header.sequence_id, each.header.sequence_end) for each in batch] == [(1, True), (2, True)]


def test_what_a_sample_says_itself(tmp_path: Path) -> None:
    one = sample(tmp_path, "ID INT32 1", "START INT32 1", "BEFORE INT32 3")
    of = warm_up_run()
    batch = of.begin(one.requests(Caller(), 0), one.said)
    assert seen(batch) == [
        {"IN": (0,), "START": (0,), "END": (1,), "READY": (1,), "ID": (0,), "BEFORE": (0, 0, 0)},
    ]
    assert batch[0].header.inputs[-1].shape == (1, 3)
    leave(of, batch[0], 4, 5)
    assert one.said["BEFORE"][1] == bytes(12)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("START FP32 1", "inference input 'START' data-type is 'FP32', but model 'm' expects 'INT32'"),
        ("ID INT32 2", "unexpected shape for input 'ID' for model 'm'. Expected [-1,1], got [1,2]"),
        ("AFTER INT32 1", "unexpected inference input 'AFTER' for model 'm'"),
    ],
)
def test_what_a_sample_may_not_say(named: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sample(tmp_path, named)
    assert words in caught.value.message
    config = parse_text(CONFIG + warm_up(named), "config.pbtxt").config
    (mistake,) = warm_up_mistakes(config, SIGNATURE, tmp_path)
    assert words in mistake.message


def test_an_iterative_model_has_its_turns(tmp_path: Path) -> None:
    of = warm_up_run(iterative=True)
    (request,) = batch = of.begin(sample(tmp_path).requests(Caller(), 0), {})
    assert seen(batch)[0] == {"IN": (0,), "START": (1,), "END": (0,), "READY": (1,), "ID": (1,), "BEFORE": (0,)}
    leave(of, request, 7, 8)
    of.again(request)
    assert seen(batch)[0] == {"IN": (0,), "START": (0,), "END": (0,), "READY": (1,), "ID": (1,), "BEFORE": (7, 8)}


def recorded(value: int, **says: Any) -> InferenceRequest:
    header = RequestHeader("m", "", [TensorSpec("IN", dtypes.INT32, (1, 1))], **says)
    return InferenceRequest(header, [struct.pack("<i", value)], Caller(), 0)


def test_recorded_requests_of_one_sequence_go_on() -> None:
    of = warm_up_run()
    starts, states = [], []
    for says in (
        {"sequence_start": True},
        {},
        {"sequence_end": True},
        {},  # the one before is over: this begins another
        {"sequence_start": True},
    ):
        batch = of.begin([recorded(5, sequence_id=9, **says)], {})
        (found,) = seen(batch)
        assert (found["ID"], found["END"]) == ((9,), (1 if "sequence_end" in says else 0,))
        starts += found["START"]
        states += found["BEFORE"]
        leave(of, batch[0], found["BEFORE"][0] + 1)
    assert starts == [1, 0, 0, 1, 1]
    assert states == [0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("rows", "sequence_id", "words"),
    [(2, 9, "must specify batch-size 1"), (1, "nine", "data-type is 'BYTES', but model 'm' expects 'INT32'")],
)
def test_recorded_requests_that_no_sequence_takes(rows: int, sequence_id: Any, words: str, tmp_path: Path) -> None:
    parameter = 'parameters { key: "WARMUP_REQUESTS" value: { string_value: "lines" } }'
    config = parse_text(CONFIG + parameter, "config.pbtxt").config
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "lines").write_text(
        f'{{"parameters": {{"sequence_id": {sequence_id!r}}}, "inputs": [{{"name": "IN", "shape": [{rows}, 1], '
        f'"datatype": "INT32", "data": {[1] * rows}}}]}}'.replace("'", '"')
    )
    with pytest.raises(InvalidArgument) as caught:
        recorded_samples(config, SIGNATURE, tmp_path, infer_request.read_recorded_request)
    assert words in caught.value.message
