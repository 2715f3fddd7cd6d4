"""Calls written as Triton's documentation and examples write them: the model's name is an element of a BYTES tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from laboratory import laboratory, said
from serving import Serving, python_model, serving

ADD_SUB = """
def initialize(self, args):
    import json
    self.model_config = json.loads(args["model_config"])
    config = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT0")
    self.output0_dtype = pb_utils.triton_string_to_numpy(config["data_type"])

def execute(self, requests):
    responses = []
    for request in requests:
        in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        out_tensor_0 = pb_utils.Tensor("OUTPUT0", (in_0 + in_1).astype(self.output0_dtype))
        out_tensor_1 = pb_utils.Tensor("OUTPUT1", (in_0 - in_1).astype(self.output0_dtype))
        responses.append(pb_utils.InferenceResponse(output_tensors=[out_tensor_0, out_tensor_1]))
    return responses
"""
COUNT = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        for number in range(int(value[0])):
            out = pb_utils.Tensor("OUTPUT0", np.array([number], np.float32))
            sender.send(pb_utils.InferenceResponse(output_tensors=[out]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    return None
"""
_ASKED = """
def asked(self, request, name, outputs=("OUTPUT0", "OUTPUT1")):
    in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
    in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
    return pb_utils.InferenceRequest(
        model_name=name, requested_output_names=list(outputs), inputs=[in_0, in_1][: len(outputs)]
    )

def name_in(self, request):
    return pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
"""
SYNC = f"""{_ASKED}
def execute(self, requests):
    responses = []
    for request in requests:
        infer_response = self.asked(request, self.name_in(request)).exec()
        if infer_response.has_error():
            raise pb_utils.TritonModelException(infer_response.error().message())
        responses.append(pb_utils.InferenceResponse(output_tensors=infer_response.output_tensors()))
    return responses
"""
ASYNC = f"""{_ASKED}
async def execute(self, requests):
    import asyncio
    responses = []
    for request in requests:
        awaits = [self.asked(request, self.name_in(request)).async_exec() for _ in range(2)]
        infer_responses = await asyncio.gather(*awaits)
        for infer_response in infer_responses:
            if infer_response.has_error():
                raise pb_utils.TritonModelException(infer_response.error().message())
        output0 = pb_utils.get_output_tensor_by_name(infer_responses[0], "OUTPUT0")
        output1 = pb_utils.get_output_tensor_by_name(infer_responses[1], "OUTPUT1")
        responses.append(pb_utils.InferenceResponse(output_tensors=[output0, output1]))
    return responses
"""
_SUM = """
def total(self, responses):
    values = []
    for infer_response in responses:
        if infer_response.has_error():
            raise pb_utils.TritonModelException(infer_response.error().message())
        if len(infer_response.output_tensors()) > 0:
            values.append(pb_utils.get_output_tensor_by_name(infer_response, "OUTPUT0").as_numpy())
    total = np.sum(values, axis=0, dtype=np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", total), pb_utils.Tensor("OUTPUT1", total)])
"""
DECOUPLED = f"""{_ASKED}{_SUM}
def execute(self, requests):
    return [
        self.total(self.asked(request, self.name_in(request), ["OUTPUT0"]).exec(decoupled=True))
        for request in requests
    ]
"""
ASYNC_DECOUPLED = f"""{_ASKED}{_SUM}
async def execute(self, requests):
    responses = []
    for request in requests:
        infer_responses = await self.asked(request, self.name_in(request), ["OUTPUT0"]).async_exec(decoupled=True)
        responses.append(self.total([infer_response async for infer_response in infer_responses]))
    return responses
"""


def config(inputs: str, outputs: str, more: str = "") -> str:
    def tensors(kind: str, names: str) -> str:
        listed = ", ".join(
            f'{{ name: "{name}" data_type: {"TYPE_STRING" if name == "MODEL_NAME" else "TYPE_FP32"} dims: [ -1 ] }}'
            for name in names.split()
        )
        return f"{kind} [{listed}]\n"

    group = "instance_group [{ kind: KIND_CPU }]\n"
    return f'backend: "python"\n{tensors("input", inputs)}{tensors("output", outputs)}{group}{more}'


CALLING = {"sync": SYNC, "async": ASYNC, "decoupled": DECOUPLED, "async_decoupled": ASYNC_DECOUPLED}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("examples")
    models = laboratory(folder / "models")
    both = "OUTPUT0 OUTPUT1"
    python_model(models, "add_sub", ADD_SUB, config("INPUT0 INPUT1", both))
    python_model(models, "count", COUNT, config("INPUT0", "OUTPUT0", "model_transaction_policy { decoupled: true }"))
    for name, source in CALLING.items():
        python_model(models, name, source, config("MODEL_NAME INPUT0 INPUT1", both))
    with serving(models, folder / "log") as running:
        yield running


def infer(server: Serving, model: str, called: str) -> tuple[int, Any]:
    """Have a model call another with INPUT0 [3] and INPUT1 [1]; return the status, and the outputs or the error."""
    inputs = [
        {"name": "MODEL_NAME", "shape": [1], "datatype": "BYTES", "data": [called]},
        {"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [3.0]},
        {"name": "INPUT1", "shape": [1], "datatype": "FP32", "data": [1.0]},
    ]
    status, _, body = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": inputs})
    answer = json.loads(body)
    return status, answer["error"] if "error" in answer else [output["data"] for output in answer["outputs"]]


@pytest.mark.parametrize(
    ("model", "called", "outputs"),
    [
        ("sync", "add_sub", [[4.0], [2.0]]),
        ("async", "add_sub", [[4.0], [2.0]]),
        ("decoupled", "count", [[3.0], [3.0]]),
        ("async_decoupled", "count", [[3.0], [3.0]]),
    ],
)
def test_examples_run_as_they_are(server: Serving, model: str, called: str, outputs: list[list[float]]) -> None:
    for _ in range(2):
        assert infer(server, model, called) == (200, outputs)
        status, error = infer(server, model, "missing")
        assert status == 500
        assert "Failed for execute the inference request. Model 'missing' is not ready." in error


FAILING = {
    "model_name=b'\\xff'": "TypeError",
    "request_id='\\ud800'": "TypeError",
    "correlation_id='\\udcff'": "TritonModelException",
    "timeout=-1": "TypeError",
    "inputs=[5]": "TypeError",
    "inputs=[pb_utils.Tensor(b'\\xff', np.zeros(1))]": "TypeError",
    "requested_output_names=['\\ud800']": "TypeError",
    "parameters={'a': 2**70}": "INVALID_ARG",
    "parameters={'a': '\\ud800'}": "INVALID_ARG",
    "correlation_id='x' * 1000": "UNSUPPORTED",
}


@pytest.mark.parametrize("fields", FAILING)
@pytest.mark.parametrize("way", ["{}.exec()", "next({}.exec(decoupled=True))", "await {}.async_exec()"])
def test_a_call_that_cannot_be_sent_fails_alone(server: Serving, fields: str, way: str) -> None:
    """The call fails, those after it do not, nor do the next requests to the model."""
    call = way.format(f"pb_utils.InferenceRequest(**{{**usual, **dict({fields})}})")
    program = f"""
inputs = [pb_utils.Tensor("INPUT0", np.array([[1.0, 2.0]], np.float32))]
usual = dict(model_name="echo", requested_output_names=["OUTPUT0"], inputs=inputs)
for _ in range(3):
    try:
        tell({call})
    except (TypeError, pb_utils.TritonModelException) as error:
        say(type(error).__name__)
    tell(ask().exec())
"""
    model = "alab" if "await" in way else "lab"
    lines = [line for line in said(server, program, model) if not line.startswith("Parameter ")]
    assert [line.partition(" ")[0] for line in lines[::2]] == [FAILING[fields]] * 3
    assert lines[1::2] == ["[[1.0, 2.0]]"] * 3
    assert said(server, "tell(ask().exec())", model) == ["[[1.0, 2.0]]"]
