"""In the place of nvidia-ml-py, on machines without GPUs: the functions that are used, as its documentation has them.

GPUs are what the JSON file ``STAND_IN_GPUS`` says, each time it is read. One that lacks a key does not tell, and
``seconds`` is the time that it takes to tell of memory. ``STAND_IN_CUDA_DRIVER`` is the CUDA that the driver supports,
such as 13000. Files in the directory ``STAND_IN_GPU_USE``, whose names are numbers of processes, say what these use of
GPU 0 while they live. What processes allocate with the stand-in for CUDA is used as well, if ``STAND_IN_CUDA`` is set.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    if not Path(os.environ["STAND_IN_GPUS"]).exists():
        raise NVMLError("Driver/library version mismatch")


def _gpus() -> list[dict[str, Any]]:
    gpus: list[dict[str, Any]] = json.loads(Path(os.environ["STAND_IN_GPUS"]).read_text())
    return gpus


def _told(handle: int, key: str) -> Any:
    try:
        return _gpus()[handle][key]
    except KeyError:
        raise NVMLError("Not Supported") from None


def nvmlSystemGetDriverVersion() -> str:
    return "570.86.15"


def nvmlSystemGetCudaDriverVersion() -> int:
    return int(os.environ.get("STAND_IN_CUDA_DRIVER", "12080"))


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_told(handle, "uuid"))


def nvmlDeviceGetName(handle: int) -> str:
    return str(_told(handle, "name"))


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    major, minor = _told(handle, "capability")
    return major, minor


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    time.sleep(_gpus()[handle].get("seconds", 0))
    total, used = _told(handle, "memory")
    used += sum(each.usedGpuMemory for each in _processes(handle) + _of_cuda(handle))
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    _told(handle, "tells processes")
    return _processes(handle) if "STAND_IN_GPU_USE" in os.environ else _of_cuda(handle)


def _processes(handle: int) -> list[SimpleNamespace]:
    folder = os.environ.get("STAND_IN_GPU_USE")
    files = sorted(Path(folder).iterdir()) if folder and handle == 0 else []
    return [
        SimpleNamespace(pid=int(file.name), usedGpuMemory=int(file.read_text() or 0))
        for file in files
        if Path("/proc", file.name).exists()
    ]


def _of_cuda(handle: int) -> list[SimpleNamespace]:
    """Return what processes use by the files of the stand-in for CUDA, whose names are GPU, process and number."""
    used: Counter[int] = Counter()
    folder = os.environ.get("STAND_IN_CUDA")
    for file in Path(folder).glob(f"{handle}-*-*") if folder else ():
        with suppress(FileNotFoundError):  # freed in between
            used[int(file.name.split("-")[1])] += file.stat().st_size
    alive = [pid for pid in sorted(used) if Path("/proc", str(pid)).exists()]
    return [SimpleNamespace(pid=pid, usedGpuMemory=used[pid]) for pid in alive]


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=_told(handle, "percent"), memory=0)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return int(_told(handle, "milliwatts"))


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return int(_told(handle, "milliwatts_allowed"))


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    return int(_told(handle, "millijoules"))


NVML_DEVICE_MIG_ENABLE = 1


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    return list(_told(handle, "mig"))


NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0


def nvmlDeviceGetP2PStatus(handle: int, other: int, index: int) -> int:
    assert index == NVML_P2P_CAPS_INDEX_NVLINK
    return NVML_P2P_STATUS_OK if other in _told(handle, "linked") else 4
