"""Text models in Python that have the tensors of an engine: they say their prompt word by word, or a script."""

from __future__ import annotations

from pathlib import Path

from serving import python_model

WORDS = """
def execute(self, requests):
    for request in requests:
        def given(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy().reshape(-1)[0]

        prompt = given("text_input").decode()
        settings = json.loads(given("sampling_parameters"))
        if "raise" in prompt:
            raise pb_utils.TritonModelException("the model has had enough")
        words = (SCRIPT or (json.dumps(settings) if "settings" in prompt else prompt)).split(" ")
        words = words[: settings.get("max_tokens") or 1000]
        sender = request.get_response_sender()
        for number, word in enumerate(words):
            if "for ever" in prompt:
                while not sender.is_cancelled():
                    sender.send(said("on "))
                print("cancelled by the client", flush=True)
            last = number == len(words) - 1
            if "break" in word:
                error = pb_utils.TritonError("it broke")
                sender.send(pb_utils.InferenceResponse(error=error))
                break
            reason = b"None" if not last else b"length" if 0 < (settings.get("max_tokens") or 0) < 1000 else b"stop"
            sender.send(said(word if last else word + " ", reason, len(prompt.split(" ")), given("return_logprobs")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HEADER = """
import json

SCRIPT = %r


def said(word, reason=b"None", prompt=1, likely=False):
    tensors = [
        pb_utils.Tensor("text_output", np.array([word.encode()], object)),
        pb_utils.Tensor("finish_reason", np.array([reason], object)),
        pb_utils.Tensor("num_input_tokens", np.array([prompt], np.uint32)),
        pb_utils.Tensor("num_output_tokens", np.array([1], np.uint32)),
    ]
    if likely:
        entry = {"decoded_token": word, "logprob": -0.5, "rank": 1}
        other = {"decoded_token": "other", "logprob": -1.5, "rank": 2}
        tensors.append(pb_utils.Tensor("logprobs", np.array([json.dumps([{"7": entry, "9": other}])], object)))
    return pb_utils.InferenceResponse(tensors)
"""
ENGINE = """
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


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def engine(models: Path, name: str, script: str = "", parameters: str = "") -> Path:
    """Write a model that has the tensors of an engine: it says its prompt word by word, or a script."""
    folder = python_model(models, name, WORDS, ENGINE + parameters)
    add_header(folder, HEADER % script)
    return folder / "1"


def add_header(folder: Path, text: str) -> None:
    path = folder / "1" / "model.py"
    path.write_text(path.read_text().replace("\n\nclass", f"{text}\n\nclass", 1))
