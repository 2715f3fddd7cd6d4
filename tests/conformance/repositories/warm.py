"""Models with warm-up samples, most of which do not fit the model."""

from __future__ import annotations

from conformance.repositories import Files, python

_CPU = "instance_group [ { kind: KIND_CPU } ]"
_SEQUENCES = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


def tensor(described: str, name: str = "IN") -> str:
    """Return an input of a sample, described as in ``INT32 dims: 2 zero_data: true``."""
    return f'inputs {{ key: "{name}" value {{ data_type: TYPE_{described} }} }}'


def warmed(inputs: str, batch_size: int = 1, more: str = "", dims: int = 2, file: bytes | None = None) -> Files:
    """Return a model with one sample of ``inputs``; ``file`` is the content of the sample's data file."""
    sample = f'model_warmup [ {{ name: "first" batch_size: {batch_size} {inputs} {more} }} ]'
    files = python("echo", f"IN INT32 {dims}", f"OUT INT32 {dims}", f"{_CPU}\ndynamic_batching {{}}\n{sample}", batch=4)
    return files if file is None else files | {"warmup/data": file}


def sequence(*controls: str) -> Files:
    """Return a model of sequences whose sample also has ``controls``."""
    sample = f'model_warmup [ {{ name: "first" batch_size: 2 {" ".join((ZEROS, *controls))} }} ]'
    return python("controls", "IN INT32 2", "SAMPLES STRING -1", _CPU + _SEQUENCES + sample, batch=4)


ZEROS = tensor("INT32 dims: 2 zero_data: true")
DATA = tensor('INT32 dims: 2 input_data_file: "data"')

MODELS = {
    "filed": warmed(DATA, file=b"\x05\0\0\0\x06\0\0\0"),
    "longfile": warmed(DATA, file=bytes(12)),
    "missingfile": warmed(tensor('INT32 dims: 2 input_data_file: "none"')),
    "nobatches": python(
        "echo",
        "IN INT32 2",
        "OUT INT32 2",
        f'{_CPU}\nmodel_warmup [ {{ name: "first" batch_size: 1 {ZEROS} }} ]',
    ),
    "nodata": warmed(tensor("INT32 dims: 2")),
    "noinputs": warmed(""),
    "norows": warmed(ZEROS, batch_size=0),
    "numbers": warmed(tensor("INT32 dims: 2 random_data: true")),
    "otherdims": warmed(tensor("INT32 dims: 3 zero_data: true")),
    "othertype": warmed(tensor("FP32 dims: 2 zero_data: true")),
    "rows": warmed(ZEROS, batch_size=3),
    "sequences": sequence(),
    "sequencescontrols": {
        **sequence(
            tensor("FP32 dims: 1 zero_data: true", "START"),
            tensor("INT32 dims: 1 zero_data: true", "END"),
            tensor('BOOL dims: 1 input_data_file: "yes"', "READY"),
            tensor("UINT64 dims: 1 zero_data: true", "ID"),
        ),
        "warmup/yes": b"\x01",
    },
    "sequencesotherdims": sequence(tensor("FP32 dims: 2 zero_data: true", "START")),
    "sequencesothertype": sequence(tensor("INT32 dims: 1 zero_data: true", "START")),
    "shortfile": warmed(DATA, file=b"1234"),
    "twice": warmed(ZEROS, more="count: 2"),
    "variable": warmed(tensor("INT32 dims: -1 zero_data: true"), dims=-1),
    "zeros": warmed(ZEROS),
}
