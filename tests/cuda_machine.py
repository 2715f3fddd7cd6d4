"""A machine with GPUs for tests: stand-ins for CUDA and NVML, a server on it, and NVIDIA's client module beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cuda_counts
from serving import Serving

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
GIB = 1 << 30


class CudaMachine:
    """Two GPUs of 1 GiB, which the processes with ``environment`` share."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """``settings`` are further environment variables, such as those of the stand-in for CUDA."""
        self.memory = folder / "gpu-memory"
        self.memory.mkdir(parents=True)
        gpus = folder / "gpus.json"
        gpus.write_text(json.dumps([_gpu(number) for number in range(2)]))
        self.environment = {
            "PYTHONPATH": os.pathsep.join(
                [*(str(STAND_INS / library) for library in ("nvml", "cuda")), os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
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
