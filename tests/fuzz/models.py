"""The models of the server that is fuzzed: one of each kind that there is, each with answers that are known."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final, NamedTuple

from serving import IDENTITY, IN_PROCESS, ensemble, pbtxt, python_model, step


class Tensor(NamedTuple):
    """An input of a model."""

    name: str
    datatype: str
    columns: int = -1
    """Elements of a row; -1: any number."""


class Model(NamedTuple):
    """What can be asked of a model."""

    inputs: tuple[Tensor, ...]
    rows: int = 4
    """The most rows of a batch; 0: tensors have no batches."""
    output: str = "OUTPUT0"
    sequences: bool = False
    decoupled: bool = False


_FP32: Final = (Tensor("INPUT0", "FP32"),)
_ONE: Final = (Tensor("INPUT0", "FP32", 1),)
_TEXTS: Final = (Tensor("text_input", "BYTES", 1), Tensor("sampling_parameters", "BYTES", 1))
TYPES: Final = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16",
    "BYTES",
)  # fmt: skip
MODELS: Final[dict[str, Model]] = {
    "worker": Model(_FP32),
    "inside": Model(_FP32),
    "onnx": Model((Tensor("INPUT0", "FP32", 4),)),
    "batched": Model((Tensor("INPUT0", "INT32"),)),
    "text": Model((Tensor("INPUT0", "BYTES"),)),
    "types": Model(tuple(Tensor(f"IN_{name}", name) for name in TYPES), rows=0, output=""),
    "direct": Model(_ONE, rows=1, sequences=True),
    "oldest": Model(_ONE, rows=1, sequences=True),
    "turns": Model(_ONE, rows=1, sequences=True),
    "pipeline": Model(_FP32, rows=1),
    "calls": Model(_FP32),
    "counts": Model((Tensor("INPUT0", "INT32", 1),), decoupled=True),
    "cached": Model(_FP32),
    "wrong": Model((Tensor("INPUT0", "INT32", 1),), rows=0),
    "words": Model(_TEXTS, rows=0, output="text_output", decoupled=True),
    "engine": Model(_TEXTS, rows=0, output="text_output", decoupled=True),
    "vectors": Model((Tensor("text_input", "BYTES", 1),), output="embedding"),
    "hears": Model((Tensor("audio", "FP32"),), rows=0, output="text_output"),
    "speaks": Model((Tensor("text_input", "BYTES", 1),), rows=0, output="audio"),
    "paints": Model((Tensor("text_input", "BYTES", 1),), rows=0, output="image"),
    "classes": Model((Tensor("text_input", "BYTES", 1),), rows=0, output="probabilities"),
    "ratings": Model((Tensor("query", "BYTES", 1), Tensor("documents", "BYTES")), rows=0, output="scores"),
}
GUESTS: Final = ("foreign_segment", "foreign_segment_b", "foreign_segment_é")
"""Models that are not there at first: loads bring them."""
ON_DISK: Final = "disk"
"""A model of the repository that is not loaded at first, whose configuration changes."""
COUNTED: Final = "counted"
"""A model that no input names: how many requests it has had is known."""
ROLLED: Final = "rolled"
"""A model with two versions, of which one serves."""
ARMS: Final = "arms"
"""A name with a route, which loads may change."""
LOADED: Final = (*MODELS, COUNTED, ROLLED)
"""The models that are loaded at first."""

_BATCHED: Final = """
dynamic_batching {
  preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 300 priority_levels: 3 default_priority_level: 2
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 20000000 max_queue_size: 500 }
}
"""
_SUMS: Final = """
def initialize(self, args):
    self.sums = {}

def execute(self, requests):
    responses = []
    for request in requests:
        of = request.correlation_id()
        value = request.inputs()[0].as_numpy()
        if len(self.sums) > 1000:
            self.sums.clear()
        begins = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.sums[of] = value + (0 if begins or not of else self.sums.get(of, 0))
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.sums[of])]))
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.sums[of]
    return responses
"""
_TURNS: Final = """
def initialize(self, args):
    self.left = {}

def execute(self, requests):
    responses = []
    for request in requests:
        value = request.inputs()[0].as_numpy()
        of = request.correlation_id()
        if len(self.left) > 1000:
            self.left.clear()
        begins = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        asked = float(np.clip(np.nan_to_num(value.flat[0]), 1, 5))
        left = asked if begins else self.left.get(of, 1)
        self.left[of] = left - 1
        if left > 1:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            responses.append(None)
        else:
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return responses
"""
_TYPES: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        outputs = [
            pb_utils.Tensor.from_dlpack("OUT_BF16", tensor.to_dlpack())
            if tensor.name() == "IN_BF16"
            else pb_utils.Tensor("OUT" + tensor.name()[2:], tensor.as_numpy())
            for tensor in request.inputs()
        ]
        answers.append(pb_utils.InferenceResponse(outputs))
    return answers
"""
_CALLS: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        call = pb_utils.InferenceRequest(
            model_name="inside", requested_output_names=["OUTPUT0"], inputs=request.inputs()
        )
        answer = call.exec()
        outputs = [] if answer.has_error() else answer.output_tensors()
        answers.append(pb_utils.InferenceResponse(outputs, error=answer.error()))
    return answers
"""
_COUNTS: Final = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(min(int(request.inputs()[0].as_numpy().flat[0]), 20)):
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_WRONG: Final = """
def execute(self, requests):
    which = int(requests[0].inputs()[0].as_numpy().flat[0])
    right = [pb_utils.Tensor("OUTPUT0", np.array([which], np.int32))]
    if which == 1:
        raise ValueError("a model of the fuzzer raises")
    if which == 2:
        raise pb_utils.TritonModelException("half \\ud800")
    if which == 3:
        return []
    if which == 4:
        return None
    if which == 5:
        right = [pb_utils.Tensor("OTHER", np.array([which], np.int32))]
    if which == 6:
        right = [pb_utils.Tensor("OUTPUT0", np.array([which], np.float64))]
    if which == 7:
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("x " * 100_000)) for _ in requests]
    if which == 8:
        return [pb_utils.InferenceResponse(right, parameters={"a": 1}) for _ in requests]
    return [pb_utils.InferenceResponse(right) for _ in requests]
"""
"""Does what models should not, as its input says."""
_WORDS: Final = """
def execute(self, requests):
    for request in requests:
        def given(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy().reshape(-1)[0]

        words = given("text_input").decode(errors="replace").split(" ")[:30]
        sender = request.get_response_sender()
        for number, word in enumerate(words):
            if sender.is_cancelled():
                break
            last = number == len(words) - 1
            tensors = [
                pb_utils.Tensor("text_output", np.array([(word if last else word + " ").encode()], object)),
                pb_utils.Tensor("finish_reason", np.array([b"stop" if last else b"None"], object)),
                pb_utils.Tensor("num_input_tokens", np.array([len(words)], np.uint32)),
                pb_utils.Tensor("num_output_tokens", np.array([1], np.uint32)),
            ]
            if given("return_logprobs"):
                entry = {"decoded_token": word, "logprob": -0.5, "rank": 1}
                tensors.append(pb_utils.Tensor("logprobs", np.array([json.dumps([{"7": entry}])], object)))
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_TEXT_MODEL: Final = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_logprobs" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "logprobs" data_type: TYPE_STRING dims: [ -1 ] }
]
instance_group [{ kind: KIND_CPU }]
"""
_PARSER: Final = 'parameters { key: "TOOL_CALL_PARSER" value: { string_value: "hermes" } }'
_VECTORS: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)
        vectors = np.array([[len(text), 0, 3, 4] for text in texts], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vectors)]))
    return answers
"""
_RATINGS: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        documents = pb_utils.get_input_tensor_by_name(request, "documents").as_numpy().reshape(-1)
        scores = np.array([len(document) for document in documents], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)]))
    return answers
"""

_HEARS: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        audio = pb_utils.get_input_tensor_by_name(request, "audio").as_numpy()
        heard = {"text_output": f"{len(audio)} samples", "segments": '[{"start": 0.0, "end": 1.0, "text": "a"}]'}
        tensors = [pb_utils.Tensor(name, np.array([text.encode()], object)) for name, text in heard.items()]
        answers.append(pb_utils.InferenceResponse(tensors))
    return answers
"""
_SPEAKS: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
        audio = pb_utils.Tensor("audio", np.full(len(text), 0.5, np.float32))
        answers.append(pb_utils.InferenceResponse([audio, pb_utils.Tensor("sample_rate", np.array([8000], np.uint32))]))
    return answers
"""
_PAINTS: Final = """
def execute(self, requests):
    image = pb_utils.Tensor("image", np.array([b"PNG"], object))
    return [pb_utils.InferenceResponse([image]) for _ in requests]
"""
_CLASSES: Final = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
        scores = np.array([len(text), 1, 0], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", scores)]))
    return answers
"""
_TEXT: Final = "text_input STRING 1"
_MEDIA: Final[dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "hears": (
        _HEARS,
        ("audio FP32 -1", "language STRING 1?", "task STRING 1?", "prompt STRING 1?", "temperature FP32 1?",
         "timestamps STRING 1?"),
        ("text_output STRING 1", "segments STRING 1"),
    ),
    "speaks": (_SPEAKS, (_TEXT, "voice STRING 1?", "speed FP32 1?"), ("audio FP32 -1", "sample_rate UINT32 1")),
    "paints": (
        _PAINTS,
        (_TEXT, "negative_prompt STRING 1?", "width INT32 1?", "height INT32 1?", "num_inference_steps INT32 1?",
         "guidance_scale FP32 1?", "seed INT64 1?"),
        ("image STRING 1",),
    ),
    "classes": (_CLASSES, (_TEXT,), ("probabilities FP32 3",)),
}  # fmt: skip
"""Models of speech, images and classes: their programs, and their inputs and outputs as name, type and size."""


def _media_config(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str:
    made = []
    for side, tensors in (("input", inputs), ("output", outputs)):
        for name, kind, size in map(str.split, tensors):
            more = "optional: true" if size.endswith("?") else ""
            made.append(f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: [ {size.strip("?")} ] {more} }}')
    return "\n".join(['backend: "python" max_batch_size: 0', *made, _CPU, IN_PROCESS])


def write(folder: Path) -> None:
    """Write the repository."""
    python_model(folder, "worker", IDENTITY)
    python_model(folder, "inside", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(folder, "batched", IDENTITY, pbtxt(more=_BATCHED, datatype="TYPE_INT32", parameters=IN_PROCESS))
    python_model(folder, "text", IDENTITY, pbtxt(datatype="TYPE_STRING", parameters=IN_PROCESS))
    types = (
        f'backend: "python" max_batch_size: 0 input [ {_tensors("IN", "optional: true")} ] output [ {_tensors("OUT")} ]'
    )
    python_model(folder, "types", _TYPES, f"{types} {_CPU}")
    idle = "max_sequence_idle_microseconds: 400000"
    for name, strategy in (("direct", "direct {}"), ("oldest", "oldest { max_candidate_sequences: 64 }")):
        more = f"sequence_batching {{ {idle} {strategy} }}"
        python_model(folder, name, _SUMS, pbtxt(batch=64, dims="1", more=more, parameters=IN_PROCESS))
    more = f"sequence_batching {{ {idle} iterative_sequence: true }}"
    python_model(folder, "turns", _TURNS, pbtxt(batch=64, dims="1", more=more, parameters=IN_PROCESS))
    ensemble(folder, "pipeline", step("worker", "INPUT0", "MIDDLE"), step("inside", "MIDDLE", "OUTPUT0"))
    python_model(folder, "calls", _CALLS)
    decoupled = "model_transaction_policy { decoupled: true }"
    python_model(folder, "counts", _COUNTS, pbtxt(dims="1", more=decoupled, datatype="TYPE_INT32"))
    cached = "dynamic_batching {} response_cache { enable: true }"
    python_model(folder, "cached", IDENTITY, pbtxt(more=cached, parameters=IN_PROCESS))
    python_model(folder, "wrong", _WRONG, pbtxt(batch=0, dims="1", more="", datatype="TYPE_INT32"))
    words = python_model(folder, "words", _WORDS, _TEXT_MODEL + _PARSER)
    source = words / "1" / "model.py"
    source.write_text(f"import json\n{source.read_text()}")
    (words / "1" / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }} {% endfor %}")
    vectors = pbtxt(datatype="TYPE_STRING", dims="1").replace('"INPUT0"', '"text_input"')
    vectors = vectors.replace(
        '"OUTPUT0" data_type: TYPE_STRING dims: [ 1 ]', '"embedding" data_type: TYPE_FP32 dims: [ 4 ]'
    )
    python_model(folder, "vectors", _VECTORS, vectors)
    python_model(folder, "ratings", _RATINGS, _RATING_MODEL)
    for name, (source, inputs, outputs) in _MEDIA.items():
        python_model(folder, name, source, _media_config(inputs, outputs))
    _write_onnx(folder / "onnx")
    (folder / "engine" / "1").mkdir(parents=True)
    (folder / "engine" / "1" / "model.json").write_text('{"model": "m", "mortal": false, "most_tokens": 40}')
    (folder / "engine" / "config.pbtxt").write_text('backend: "vllm" instance_group [{ kind: KIND_CPU }]')
    python_model(folder, ON_DISK, IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(folder, COUNTED, IDENTITY, pbtxt(parameters=IN_PROCESS))
    first = pbtxt(more="version_policy { specific { versions: [ 1 ] } }", parameters=IN_PROCESS)
    for version in (1, 2):
        python_model(folder, ROLLED, IDENTITY, first, version)
    (folder / ARMS).mkdir()
    (folder / ARMS / "route.toml").write_text(f'[[arm]]\nmodel = "{ROLLED}"\nweight = 1\n')


_CPU: Final = "instance_group [{ kind: KIND_CPU }]"
_RATING_MODEL: Final = f"""
backend: "python"
max_batch_size: 0
input {{ name: "query" data_type: TYPE_STRING dims: [ 1 ] }}
input {{ name: "documents" data_type: TYPE_STRING dims: [ -1 ] }}
output [ {{ name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }} ]
{_CPU}
"""


def _tensors(prefix: str, more: str = "") -> str:
    """Return a tensor of each data type, as a configuration has them."""
    types = {name: "STRING" if name == "BYTES" else name for name in TYPES}
    return ", ".join(
        f'{{ name: "{prefix}_{name}" data_type: TYPE_{called} dims: [ -1 ] {more} }}' for name, called in types.items()
    )


def _write_onnx(folder: Path) -> None:
    """Write a model that doubles rows of four numbers."""
    # Its import takes a third of a second, which tests that write no models need not wait for.
    import onnx
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("INPUT0", "OUTPUT0")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])], "g", tensors[:1], tensors[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 8 dynamic_batching {{}} {_CPU}')


def brought(code: str = IDENTITY) -> str:
    """Return the file of a Python model as a load brings it."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    source = (
        f"import numpy as np\nimport triton_python_backend_utils as pb_utils\n\nclass TritonPythonModel:\n{lines}\n"
    )
    return base64.b64encode(source.encode(errors="surrogateescape")).decode()


BROUGHT_CONFIG: Final = json.dumps(
    {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "parameters": {"EXECUTION_MODE": {"string_value": "in_process"}},
    }
)
"""The configuration of a model that a load brings."""
