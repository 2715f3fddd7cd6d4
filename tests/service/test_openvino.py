"""OpenVINO models behind a server: what stock clients get is what OpenVINO itself computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from nerite.frameworks.openvino.graph import openvino
from serving import Serving, serving

ov = openvino()
ops = ov.opset13
EXACT = 'parameters { key: "INFERENCE_PRECISION_HINT" value { string_value: "f32" } }\n'
PROTOCOLS = ("http", "grpc")


def parameter(name: str, dims: list[int], element: Any = ov.Type.f32) -> Any:
    node = ops.parameter(ov.PartialShape(dims), element, name=f"{name}_node")
    node.output(0).set_names({name})
    return node


def result(name: str, node: Any) -> Any:
    end = ops.result(node)
    end.output(0).add_names({name})
    return end


def network() -> Any:
    """A convolution and a layer: [N, 3, 8, 8] to [N, 5]."""
    given = parameter("IN", [-1, 3, 8, 8])
    random = np.random.default_rng(0)
    kernel = ops.constant(random.standard_normal((6, 3, 3, 3)).astype(np.float32))
    hidden = ops.relu(ops.convolution(given, kernel, [2, 2], [1, 1], [1, 1], [1, 1]))
    flat = ops.reshape(hidden, ops.constant([0, -1]), special_zero=True)
    weights = ops.constant(random.standard_normal((96, 5)).astype(np.float32))
    out = result("OUT", ops.softmax(ops.matmul(flat, weights, False, False), 1))
    return ov.Model([out], [given], "network")


def echo() -> Any:
    given = parameter("IN", [-1, -1], ov.Type.string)
    return ov.Model([result("OUT", given)], [given], "echo")


def total() -> Any:
    """OUT = what the sequence has sent so far; it begins anew with START."""
    given, start, before = (parameter(name, [-1, 1]) for name in ("IN", "START", "BEFORE"))
    going = ops.subtract(ops.constant(np.float32(1)), start)
    sum_ = ops.add(given, ops.multiply(before, going))
    ends = [result("OUT", ops.add(sum_, ops.constant(np.float32(0)))), result("AFTER", sum_)]
    return ov.Model(ends, [given, start, before], "total")


TOTAL = """
backend: "openvino"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
  control_input [{
    name: "START"
    control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }]
  }]
  state [{ input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ] }]
}
"""
BYTES = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_STRING dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }]
"""


def save(models: Path, name: str, made: Any, config: str = "") -> None:
    folder = models / name / "1"
    folder.mkdir(parents=True)
    ov.serialize(made, str(folder / "model.xml"), str(folder / "model.bin"))
    (models / name / "config.pbtxt").write_text(config + EXACT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("openvino")
    models = folder / "models"
    save(models, "network", network())
    save(models, "pair", network(), "max_batch_size: 8\ninstance_group [{ kind: KIND_CPU count: 2 }]\n")
    save(models, "echo", echo(), BYTES)
    save(models, "total", total(), TOTAL)
    with serving(models, folder / "log", "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


@pytest.fixture(scope="module")
def own() -> Any:
    """OpenVINO's own answers."""
    return ov.Core().compile_model(network(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def infer(server: Serving, protocol: str, model: str, array: Any, datatype: str, **more: Any) -> Any:
    library = http_client if protocol == "http" else grpc_client
    with library.InferenceServerClient(getattr(server, protocol)) as client:
        tensor = library.InferInput("IN", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], **more).as_numpy("OUT")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["network", "pair"])
def test_answers_are_those_of_openvino(server: Serving, own: Any, protocol: str, model: str) -> None:
    rows = np.random.default_rng(2).random((4, 3, 8, 8), dtype=np.float32)
    np.testing.assert_allclose(infer(server, protocol, model, rows, "FP32"), own(rows)[0], rtol=1e-5)


def test_many_at_once(server: Serving, own: Any) -> None:
    rows = np.random.default_rng(3).random((64, 3, 8, 8), dtype=np.float32)
    wanted = own(rows)[0]
    with ThreadPoolExecutor(16) as callers:
        calls = [
            callers.submit(infer, server, PROTOCOLS[at % 2], "pair", rows[at : at + 1 + at % 3], "FP32")
            for at in range(60)
        ]
        for at, call in enumerate(calls):
            np.testing.assert_allclose(call.result(), wanted[at : at + 1 + at % 3], rtol=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_strings(server: Serving, protocol: str) -> None:
    sent = np.array([[b"", "zoë".encode(), b"a\0b"]], object)
    assert infer(server, protocol, "echo", sent, "BYTES").tolist() == sent.tolist()


def test_what_the_model_says_is_in_the_metadata(server: Serving) -> None:
    found = server.json("GET", "/v2/models/network")
    assert found["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    assert found["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [-1, 5]}]
    assert server.json("GET", "/v2/models/network/config")["max_batch_size"] == 4


def test_a_state_goes_from_request_to_request(server: Serving) -> None:
    with grpc_client.InferenceServerClient(server.grpc) as client:
        sums = {7: [], 8: []}
        for step in range(3):
            for sequence, found in sums.items():
                tensor = grpc_client.InferInput("IN", [1, 1], "FP32")
                tensor.set_data_from_numpy(np.float32([[sequence + step]]))
                answer = client.infer(
                    "total", [tensor], sequence_id=sequence, sequence_start=step == 0, sequence_end=step == 2
                )
                found.append(float(answer.as_numpy("OUT")[0, 0]))
    assert sums == {7: [7, 15, 24], 8: [8, 17, 27]}


def test_a_load_that_fails_says_why_and_the_next_works(server: Serving) -> None:
    config = server.json("GET", "/v2/models/network/config")
    wrong = {**config, "parameters": {"NUM_STREAM": {"string_value": "2"}}}
    status, _, body = server.ask("POST", "/v2/repository/models/network/load", load(wrong))
    assert status == 400
    assert b"the parameter 'NUM_STREAM' is not yet supported by openvino backend. Did you mean NUM_STREAMS?" in body
    rows = np.ones((1, 3, 8, 8), np.float32)
    before = infer(server, "http", "network", rows, "FP32")
    for _ in range(3):
        assert server.ask("POST", "/v2/repository/models/network/load", load(config))[0] == 200
        assert np.array_equal(infer(server, "http", "network", rows, "FP32"), before)


def load(config: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": {"config": json.dumps(config)}}
