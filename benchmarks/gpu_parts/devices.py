"""The paths on which tensors stay on the card: CUDA shared memory of clients, device tensors of models and of steps.

How often tensors are copied comes from the metrics page: ``nerite_device_copies_total`` and
``nerite_device_copy_bytes_total``, by direction.
"""

from __future__ import annotations

import sys
import time
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

_DOUBLES = """
def initialize(self, args):
    import torch
    self.taken, self.given = torch.from_dlpack, lambda rows: rows
    if not torch.cuda.is_available():  # with the tests' stand-in for CUDA
        from device_arrays import DeviceArray, numpy_of
        self.taken, self.given = numpy_of, DeviceArray

def execute(self, requests):
    answers = []
    for request in requests:
        given = request.inputs()[0]
        rows = self.taken(given) if not given.is_cpu() else given.as_numpy()
        there = np.full((len(rows), 1), not given.is_cpu())
        doubled = rows * 2
        output = pb_utils.Tensor("OUT", doubled)
        if not given.is_cpu():
            output = pb_utils.Tensor.from_dlpack("OUT", self.given(doubled))
        answers.append(pb_utils.InferenceResponse([output, pb_utils.Tensor("ON_DEVICE", there)]))
    return answers
"""
_CALLS = """
def execute(self, requests):
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
    answers = []
    for request in requests:
        rows, there = request.inputs()[0], True
        for model in ("exported_wide", "doubles", "scripted_wide"):
            called = pb_utils.InferenceRequest(
                model_name=model, inputs=[rows], preferred_memory=memory, requested_output_names=["OUT"]
            )
            answer = called.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            (output,) = answer.output_tensors()
            there &= not output.is_cpu()
            rows = pb_utils.Tensor.from_dlpack("X", output.to_dlpack())
        there = pb_utils.Tensor("ON_DEVICE", np.full((rows.shape()[0], 1), there))
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", rows.to_dlpack()), there]))
    return answers
"""
_IN_PYTHON = """backend: "python"
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
_WITHIN = {"steps": "steps on one card", "calls": "calls on one card"}
"""Models of which others are parts."""
_ROWS = 32
_FIRST, _ASKED = 5, 20
_DIRECTIONS = ("to_device", "to_host", "on_device")
_TOLERANCE = "<= 0.0001"


def run(part: Part) -> None:
    """Ask with tensors in device memory, and have an ensemble keep them there."""
    if not part.gpu:
        for what in ("CUDA shared memory over http", "CUDA shared memory over grpc", *_WITHIN.values()):
            part.skip(what, "not rehearsed here: it needs a card")
        return
    models = repository(part)
    exact = {"NVIDIA_TF32_OVERRIDE": "0"}
    with part.server(models, "--allow-client-shm=true", environment=exact) as server:
        protocols: tuple[Protocol, ...] = ("http", "grpc")
        for protocol in protocols:
            for model in ("exported_wide", "doubles"):
                with part.attempt(f"CUDA shared memory over {protocol}, {model}"):
                    regions(part, server, protocol, model)
        for model, what in _WITHIN.items():
            with part.attempt(what):
                steps(part, server, model, what)
        pinned = server.metrics().get("nv_pinned_memory_pool_total_bytes", 0)
        part.figure("pinned memory: size of the pool", pinned / (1 << 20), "MiB", "== 256")


def repository(part: Part) -> Path:
    """Write an exported program, a Python model, TorchScript, an ensemble of them, and a model that calls them."""
    models = part.folder / "models"
    part.program(sys.executable, "-m", "gpu_parts.answer_models", part.folder, part.result.kind, *_MODELS).wait()
    for name in _MODELS:
        (models / name / "config.pbtxt").write_text(configuration(name, part.instances()))
    python_model(models, "doubles", _DOUBLES, _IN_PYTHON.format(width=WIDTH) + part.instances())
    python_model(models, "calls", _CALLS, _IN_PYTHON.format(width=WIDTH) + part.instances())
    (models / "steps" / "1").mkdir(parents=True)
    (models / "steps" / "config.pbtxt").write_text(_STEPS.format(width=WIDTH))
    return models


def regions(part: Part, server: Serving, protocol: Protocol, model: str) -> None:
    """Ask a model with input and output in regions that NVIDIA's client has registered."""
    library: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    given = rows("wide")
    expected = given * 2 if model == "doubles" else np.maximum(given @ weights(), 0)
    what = f"CUDA shared memory over {protocol}" + (", a Python model" if model == "doubles" else "")
    with DeviceRegions(part, server, protocol) as there:
        (tensor,), (output,) = there.inputs({"X": given}), there.outputs({"OUT": given.nbytes})
        assert isinstance(tensor.data, RegionPlace)
        assert output.place is not None
        asked = library.InferInput("X", list(given.shape), "FP32")
        asked.set_shared_memory(tensor.data.region, tensor.data.size)
        wanted = library.InferRequestedOutput("OUT")
        wanted.set_shared_memory(output.place.region, output.place.size)

        def ask() -> None:
            there.client.infer(model, [asked], outputs=[wanted])

        copies(part, server, ask, what, {"to_device": "== 0", "to_host": "== 0"})
        found = there.read(output.place.region, given.shape)
        part.figure(f"{what}: difference", np.abs(found - expected).max() / expected.max(), "", _TOLERANCE)
        listed = len(there.listed())
    part.figure(f"{what}: regions that the server lists", listed, "", "== 2")
    with DeviceRegions(part, server, protocol) as after:
        part.figure(f"{what}: regions that are left", len(after.listed()), "", "== 0")


def steps(part: Part, server: Serving, model: str, what: str) -> None:
    """Ask a model whose parts are all on the card."""
    given = rows("wide")[:_ROWS]
    expected = np.maximum(given @ weights(), 0) * 2
    expected = np.maximum(expected @ weights(), 0)
    tensor = tritonclient.http.InferInput("X", list(given.shape), "FP32")
    tensor.set_data_from_numpy(given)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        # The input to the card, once, and the output from it.
        wanted = {"to_device": "<= 1", "to_host": "<= 1"}
        copies(part, server, lambda: client.infer(model, [tensor]), what, wanted)
        answer = client.infer(model, [tensor])
    found = answer.as_numpy("OUT")
    part.figure(f"{what}: difference", np.abs(found - expected).max() / expected.max(), "", _TOLERANCE)
    there = answer.as_numpy("ON_DEVICE").all()
    part.figure(f"{what}: the Python model gets its tensor on the card", there, "", "== 1")


def copies(part: Part, server: Serving, ask: Callable[[], object], what: str, wanted: dict[str, str]) -> None:
    """Ask a few times, and report how often and how much was copied for a request."""
    for _ in range(_FIRST):  # workers are granted memory on the card after they have asked for it
        ask()
        time.sleep(0.1)
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
