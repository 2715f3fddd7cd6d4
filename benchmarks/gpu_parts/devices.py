"""The paths on which tensors stay on the card: CUDA shared memory of clients, device tensors of models and of steps.

How often tensors are copied comes from the metrics page: ``nerite_device_copies_total`` and
``nerite_device_copy_bytes_total``, by direction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from gpu_parts.answer_models import WIDTH, configuration, rows, weights
from gpu_parts.callers import Protocol
from gpu_parts.device_regions import DeviceRegions
from gpu_parts.part import Part
from nerite.tools.bench.forms import RegionPlace
from serving import Serving, python_model

_ON_DEVICE = """
def initialize(self, args):
    import torch
    self.torch = torch

def execute(self, requests):
    answers = []
    for request in requests:
        given = request.inputs()[0]
        rows = self.torch.from_dlpack(given)
        there = np.full((len(rows), 1), not given.is_cpu())
        outputs = [pb_utils.Tensor.from_dlpack("OUT", rows * 2), pb_utils.Tensor("ON_DEVICE", there)]
        answers.append(pb_utils.InferenceResponse(outputs))
    return answers
"""
_DOUBLES = """backend: "python"
max_batch_size: 32
input {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }}
output [
  {{ name: "OUT" data_type: TYPE_FP32 dims: [ {width} ] }},
  {{ name: "ON_DEVICE" data_type: TYPE_BOOL dims: [ 1 ] }}
]
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
"""
_STEPS = """platform: "ensemble"
max_batch_size: 32
input {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }}
output [
  {{ name: "OUT" data_type: TYPE_FP32 dims: [ {width} ] }},
  {{ name: "ON_DEVICE" data_type: TYPE_BOOL dims: [ 1 ] }}
]
ensemble_scheduling {{ step [
  {{ model_name: "exported_wide" model_version: -1
    input_map {{ key: "X" value: "X" }} output_map {{ key: "OUT" value: "first" }} }},
  {{ model_name: "doubles" model_version: -1 input_map {{ key: "X" value: "first" }}
    output_map [ {{ key: "OUT" value: "second" }}, {{ key: "ON_DEVICE" value: "ON_DEVICE" }} ] }},
  {{ model_name: "scripted_wide" model_version: -1
    input_map {{ key: "X" value: "second" }} output_map {{ key: "OUT" value: "OUT" }} }}
] }}
"""
_MODELS = ("exported_wide", "scripted_wide")
_ROWS = 32
_ASKED = 20
_DIRECTIONS = ("to_device", "to_host", "on_device")
_TOLERANCE = "<= 0.0001"


def run(part: Part) -> None:
    """Ask with tensors in device memory, and have an ensemble keep them there."""
    if not part.gpu:
        for what in ("CUDA shared memory over http", "CUDA shared memory over grpc", "steps on one card"):
            part.skip(what, "not rehearsed here: it needs a card")
        return
    models = repository(part)
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}
    with part.server(models, "--allow-client-shm=true", environment=exact) as server:
        protocols: tuple[Protocol, ...] = ("http", "grpc")
        for protocol in protocols:
            with part.attempt(f"CUDA shared memory over {protocol}"):
                regions(part, server, protocol)
        with part.attempt("steps on one card"):
            steps(part, server)


def repository(part: Part) -> Path:
    """Write an exported program, a Python model, TorchScript, and an ensemble of them."""
    models = part.folder / "models"
    part.program(sys.executable, "-m", "gpu_parts.answer_models", part.folder, part.result.kind, *_MODELS).wait()
    for name in _MODELS:
        (models / name / "config.pbtxt").write_text(configuration(name, part.instances()))
    python_model(models, "doubles", _ON_DEVICE, _DOUBLES.format(width=WIDTH) + part.instances())
    (models / "steps" / "1").mkdir(parents=True)
    (models / "steps" / "config.pbtxt").write_text(_STEPS.format(width=WIDTH))
    return models


def regions(part: Part, server: Serving, protocol: Protocol) -> None:
    """Ask a model with input and output in regions that NVIDIA's client has registered."""
    library: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    given = rows("wide")
    expected = np.maximum(given @ weights(), 0)
    what = f"CUDA shared memory over {protocol}"
    with DeviceRegions(part, server, protocol) as there:
        (tensor,), (output,) = there.inputs({"X": given}), there.outputs({"OUT": given.nbytes})
        assert isinstance(tensor.data, RegionPlace)
        assert output.place is not None
        asked = library.InferInput("X", list(given.shape), "FP32")
        asked.set_shared_memory(tensor.data.region, tensor.data.size)
        wanted = library.InferRequestedOutput("OUT")
        wanted.set_shared_memory(output.place.region, output.place.size)

        def ask() -> None:
            there.client.infer("exported_wide", [asked], outputs=[wanted])

        copies(part, server, ask, what, {"to_device": "== 0", "to_host": "== 0"})
        found = there.read(output.place.region, given.shape)
        part.figure(f"{what}: difference", np.abs(found - expected).max() / expected.max(), "", _TOLERANCE)
        listed = len(there.listed())
    part.figure(f"{what}: regions that the server lists", listed, "", "== 2")
    with DeviceRegions(part, server, protocol) as after:
        part.figure(f"{what}: regions that are left", len(after.listed()), "", "== 0")


def steps(part: Part, server: Serving) -> None:
    """Ask an ensemble whose steps are all on the card."""
    given = rows("wide")[:_ROWS]
    expected = np.maximum(given @ weights(), 0) * 2
    expected = np.maximum(expected @ weights(), 0)
    tensor = tritonclient.http.InferInput("X", list(given.shape), "FP32")
    tensor.set_data_from_numpy(given)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        answer = client.infer("steps", [tensor])
        # The input to the card, once, and the output from it.
        wanted = {"to_device": "<= 1", "to_host": "<= 1"}
        copies(part, server, lambda: client.infer("steps", [tensor]), "steps on one card", wanted)
    found = answer.as_numpy("OUT")
    part.figure("steps on one card: difference", np.abs(found - expected).max() / expected.max(), "", _TOLERANCE)
    there = answer.as_numpy("ON_DEVICE").all()
    part.figure("steps on one card: the Python model gets its tensor on the card", there, "", "== 1")


def copies(part: Part, server: Serving, ask: Callable[[], object], what: str, wanted: dict[str, str]) -> None:
    """Ask a few times, and report how often and how much was copied for a request."""
    ask()
    before = server.metrics()
    for _ in range(_ASKED):
        ask()
    after = server.metrics()
    for counter, unit in (("nerite_device_copies_total", ""), ("nerite_device_copy_bytes_total", "bytes")):
        if not any(key.startswith(f"{counter}{{") for key in after):
            part.error(f"{what}: copies", f"the metrics page has no {counter}")
            continue
        for direction in _DIRECTIONS:
            found = (counted(after, counter, direction) - counted(before, counter, direction)) / _ASKED
            name = f"{what}: {'bytes copied' if unit else 'copies'} {direction} a request"
            part.figure(name, found, unit, None if unit else wanted.get(direction))


def counted(page: Mapping[str, float], counter: str, direction: str) -> float:
    """Return the sum of a counter's samples of a direction."""
    label = f'direction="{direction}"'
    return sum(value for key, value in page.items() if key.startswith(f"{counter}{{") and label in key)
