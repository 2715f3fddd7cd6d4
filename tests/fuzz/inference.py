"""Valid inferences by any of the models, in each form in which they can be asked: JSON, binary tensors, protobuf."""

from __future__ import annotations

import base64
import random
import struct
from typing import Any, Final, NamedTuple

from fuzz.models import MODELS
from nerite.wire.grpc_service import ModelInferRequest

_FORMATS: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d", "BF16": "H",
}  # fmt: skip
_CONTENTS: Final = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
REGIONS: Final = ("region_0", "region_1")
"""Regions of shared memory that are registered while inputs are sent."""
REGION_SIZE: Final = 4_096
PROMPTS: Final = (
    *("once upon a time", "a", "é ü", "tell me", "one two three four five six seven"),
    'I see. <tool_call>\n{"name": "look", "arguments": {"at": "a \\"star\\""}}\n</tool_call>',
)


class Given(NamedTuple):
    """An input with its values."""

    name: str
    datatype: str
    shape: list[int]
    values: list[Any]

    @property
    def raw(self) -> bytes:
        """The values as binary tensors have them."""
        if self.datatype == "BYTES":
            texts = [each.encode() if isinstance(each, str) else each for each in self.values]
            return b"".join(struct.pack("<I", len(each)) + each for each in texts)
        return struct.pack(f"<{len(self.values)}{_FORMATS[self.datatype]}", *self.values)


class Asked(NamedTuple):
    """A valid inference."""

    model: str
    inputs: list[Given]
    outputs: list[dict[str, Any]]
    parameters: dict[str, Any]
    id: str


def asked(rng: random.Random, only: str = "", *, decoupled: bool = True) -> Asked:
    """Return an inference by any model, or by ``only``. ``decoupled``: also by one that may answer many times."""
    name = only or rng.choice([name for name, model in MODELS.items() if decoupled or not model.decoupled])
    model = MODELS[name]
    rows = min(rng.choice((1, 1, 1, 2, 4)), model.rows)
    given = []
    for tensor in model.inputs:
        if name == "types" and rng.random() < 0.7:
            continue
        columns = rng.choice((0, 1, 2, 3, 16, 200)) if tensor.columns < 0 else tensor.columns
        values = [_value(rng, name, tensor.name, tensor.datatype) for _ in range(columns * max(rows, 1))]
        given.append(Given(tensor.name, tensor.datatype, [rows, columns] if rows else [columns], values))
    outputs: list[dict[str, Any]] = []
    if model.output and rng.random() < 0.3:
        outputs = [{"name": model.output}]
        if rng.random() < 0.5:
            place = {"shared_memory_region": rng.choice(REGIONS), "shared_memory_offset": rng.choice((0, 64, 2_048))}
            place["shared_memory_byte_size"] = REGION_SIZE // 2
            kinds = ({"binary_data": True}, {"binary_data": False}, {"classification": 2}, {"base64": True}, place)
            outputs[0]["parameters"] = rng.choice(kinds)
    return Asked(name, given, outputs, _parameters(rng, sequences=model.sequences), rng.choice(("", "", "id", "é")))


def _value(rng: random.Random, model: str, name: str, datatype: str) -> Any:
    if datatype == "BYTES":
        if name == "sampling_parameters":
            return rng.choice(
                ('{"max_tokens": 4}', '{"max_tokens": 3, "temperature": 0}', '{"stop": ["c"], "max_tokens": 9}')
            )
        return rng.choice(PROMPTS)
    if datatype == "BOOL":
        return rng.random() < 0.5
    if model == "wrong":
        return rng.randrange(10)
    if datatype.startswith("F"):
        return rng.choice((0.0, 1.0, -2.5, 3.0))
    return rng.randrange(0, 100)


def _parameters(rng: random.Random, *, sequences: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if sequences:
        of: Any = rng.randrange(1, 12)
        made = {"sequence_id": of if rng.random() < 0.8 else f"sequence {of}"}
        made |= {"sequence_start": rng.random() < 0.8, "sequence_end": rng.random() < 0.5}
    if rng.random() < 0.15:
        made["priority"] = rng.randrange(4)
    if rng.random() < 0.1:
        made["timeout"] = rng.choice((1, 1_000, 10_000_000))
    if rng.random() < 0.1:
        made["own"] = rng.choice((True, 5, "text", 0.5))
    if rng.random() < 0.1:
        made["binary_data_output"] = True
    return made


def document(rng: random.Random, what: Asked) -> dict[str, Any]:
    """Return an inference as JSON, tensors and all, or with one of them in shared memory."""
    inputs = []
    for given in what.inputs:
        tensor: dict[str, Any] = {"name": given.name, "shape": given.shape, "datatype": given.datatype}
        if given.datatype == "BYTES" and rng.random() < 0.2:
            tensor["data"] = [{"b64": base64.b64encode(str(each).encode()).decode()} for each in given.values]
        elif given.datatype == "FP32" and rng.random() < 0.08:
            size = 4 * len(given.values)
            tensor["parameters"] = {"shared_memory_region": rng.choice(REGIONS), "shared_memory_byte_size": size}
        else:
            tensor["data"] = given.values
            if len(given.shape) == 2 and given.shape[0] > 1 and rng.random() < 0.5:
                tensor["data"] = [given.values[at :: given.shape[0]] for at in range(given.shape[0])]
        if given.datatype not in ("FP16", "BF16") or rng.random() < 0.2:
            inputs.append(tensor)
    return _told({"inputs": inputs}, what)


def binary(what: Asked) -> tuple[dict[str, Any], bytes]:
    """Return an inference as the JSON of a binary request and the tensors behind it."""
    inputs = [
        {
            "name": given.name,
            "shape": given.shape,
            "datatype": given.datatype,
            "parameters": {"binary_data_size": len(given.raw)},
        }
        for given in what.inputs
    ]
    return _told({"inputs": inputs}, what), b"".join(given.raw for given in what.inputs)


def _told(made: dict[str, Any], what: Asked) -> dict[str, Any]:
    if what.outputs:
        made["outputs"] = what.outputs
    if what.parameters:
        made["parameters"] = what.parameters
    if what.id:
        made["id"] = what.id
    return made


def generated(rng: random.Random, what: Asked) -> dict[str, Any]:
    """Return an inference as the generate extension has it."""
    made: dict[str, Any] = {
        given.name: given.values[0] if len(given.values) == 1 else given.values for given in what.inputs
    }
    if rng.random() < 0.3:
        made["parameters"] = {**what.parameters, "max_tokens": 3}
    if what.id:
        made["id"] = what.id
    return made


def message(rng: random.Random, what: Asked) -> bytes:
    """Return an inference as protobuf, its tensors in either of the two places."""
    request = ModelInferRequest(model_name=what.model, id=what.id)
    if rng.random() < 0.1:
        request.model_version = "1"
    typed = rng.random() < 0.4 and all(given.datatype in _CONTENTS for given in what.inputs)
    for given in what.inputs:
        tensor = request.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        if typed:
            values = [each.encode() if isinstance(each, str) else each for each in given.values]
            getattr(tensor.contents, _CONTENTS[given.datatype]).extend(values)
        elif given.datatype == "FP32" and rng.random() < 0.08:
            tensor.parameters["shared_memory_region"].string_param = rng.choice(REGIONS)
            tensor.parameters["shared_memory_byte_size"].int64_param = 4 * len(given.values)
        else:
            request.raw_input_contents.append(given.raw)
    for name, value in what.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for output in what.outputs:
        request.outputs.add(name=output["name"])
    return request.SerializeToString()
