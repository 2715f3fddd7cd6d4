"""A machine with GPUs for tests: stand-ins for CUDA and NVML, models on it, and NVIDIA's client module beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import cuda_counts
from serving import Serving

STAND_INS = [str(Path(__file__).resolve().parent / "stand_ins" / library) for library in ("nvml", "cuda")]
GIB = 1 << 30
CONFIG = """backend: "pytorch" max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [ 256 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 256 ] }
instance_group { kind: KIND_GPU gpus: 0 }
dynamic_batching { max_queue_delay_microseconds: 2000 }
"""
"""Of a model that takes x and gives y, rows of 256 elements, on the first GPU."""


class CudaMachine:
    """Two GPUs of 1 GiB, which the processes with ``environment`` share."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """``settings`` are further environment variables, such as those of the stand-in for CUDA."""
        self.memory = folder / "gpu-memory"
        self.memory.mkdir(parents=True)
        gpus = folder / "gpus.json"
        gpus.write_text(json.dumps([_gpu(number) for number in range(2)]))
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (*STAND_INS, os.environ.get("PYTHONPATH")))),
            "STAND_IN_GPUS": str(gpus),
            "STAND_IN_CUDA": str(self.memory),
            "CUDA_VISIBLE_DEVICES": "0,1",
            **settings,
        }

    def client(self, script: str, *arguments: str) -> str:
        """Run a program of a client in a process of its own; return what it prints. Raises if it fails."""
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise AssertionError(done.stderr)
        return done.stdout

    def held(self, *pids: int) -> list[str]:
        """Return what these processes hold of the GPUs' memory: allocations, and mappings of those of others."""
        return [each.name for each in cuda_counts.live(self.memory) if each.pid in pids]


def _gpu(number: int) -> dict[str, object]:
    return {"uuid": f"GPU-{number}", "name": f"Model {number}", "capability": [9, 0], "memory": [GIB, 0]}


def copies(server: Serving) -> Counter[str]:
    """Return the copies that a server and its workers have made, by direction."""
    name = "nerite_device_copies_total{direction="
    return Counter(
        {each[len(name) + 1 : -2]: int(value) for each, value in server.metrics().items() if each.startswith(name)}
    )


def torch_model(models: Path, name: str, config: str = CONFIG) -> None:
    """Write an exported program of PyTorch: y = x * 2."""
    import torch

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x * 2}

    (models / name / "1").mkdir(parents=True)
    rows = torch.export.Dim("rows", max=64)
    exported = torch.export.export(Twice().eval(), (torch.zeros(2, 256),), dynamic_shapes=({0: rows},))
    torch.export.save(exported, models / name / "1" / "model.pt2")
    (models / name / "config.pbtxt").write_text(config)


def ensemble(models: Path, name: str, *steps: str) -> None:
    """Write an ensemble of steps, one behind the other, each of which takes x and gives y."""
    tensors = ["x", *(f"t{number}" for number in range(len(steps) - 1)), "y"]
    text = "".join(
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "{taken}" }} '
        f'output_map {{ key: "y" value: "{given}" }} }}\n'
        for step, taken, given in zip(steps, tensors, tensors[1:], strict=False)
    )
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 16\n'
        'input { name: "x" data_type: TYPE_FP32 dims: [ 256 ] }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: [ 256 ] }\n'
        f"ensemble_scheduling {{ {text} }}"
    )


def infer(server: Serving, model: str, array: np.ndarray) -> np.ndarray:
    """Send x to a model and return its y."""
    tensor = {"name": "x", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
    answer = server.json("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return np.array(answer["outputs"][0]["data"], np.float32).reshape(answer["outputs"][0]["shape"])
