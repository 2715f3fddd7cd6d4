"""The NVIDIA GPUs of the machine, as the driver's management library (NVML) tells them.

It is asked through the package nvidia-ml-py, where that is installed. Asking makes no CUDA context, and so takes none
of a GPU's memory.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

_log = logging.getLogger("nerite.observability")

_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""There where a driver is loaded."""


class Gpu(NamedTuple):
    """A GPU. Its number is the one that CUDA gives it in this process, and that instance groups name."""

    number: int
    uuid: str
    name: str
    capability: float
    """Its compute capability."""
    handle: Any
    """What the library calls it."""


class Memory(NamedTuple):
    """The memory of a GPU, in bytes."""

    total: int
    used: int
    """By whatever process."""


class Readings(NamedTuple):
    """What a GPU is doing. What it cannot tell is None."""

    utilization: float | None
    """From 0 to 1."""
    memory: Memory | None
    watts: float | None
    watts_allowed: float | None
    joules: float | None
    """Since the driver was loaded."""


class GpuLibrary:
    """The management library."""

    def __init__(self, nvml: Any) -> None:
        """``nvml`` is the module ``pynvml``, initialised; None where there are no GPUs that could be used."""
        self._nvml = nvml

    def gpus(self, visible: str | None) -> list[Gpu]:
        """Return the GPUs that CUDA finds where ``CUDA_VISIBLE_DEVICES`` is ``visible`` (None: not set)."""
        if self._nvml is None:
            return []
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [
            Gpu(
                number,
                uuids[index],
                _text(nvml.nvmlDeviceGetName(handles[index])),
                _capability(*nvml.nvmlDeviceGetCudaComputeCapability(handles[index])),
                handles[index],
            )
            for number, index in enumerate(visible_indices(uuids, visible))
        ]

    def driver(self) -> str:
        """Return the version of the driver, and the newest CUDA that it can do; nothing where there are no GPUs."""
        if self._nvml is None:
            return ""
        cuda = self._nvml.nvmlSystemGetCudaDriverVersion()
        return f"{_text(self._nvml.nvmlSystemGetDriverVersion())}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}"

    def memory(self, gpu: Gpu) -> Memory | None:
        """Return the memory of a GPU; None where it does not tell."""
        info = self._asked("nvmlDeviceGetMemoryInfo", gpu)
        return None if info is None else Memory(int(info.total), int(info.used))

    def read(self, gpu: Gpu) -> Readings:
        """Return what a GPU is doing. May take some milliseconds."""
        rates = self._asked("nvmlDeviceGetUtilizationRates", gpu)
        return Readings(
            None if rates is None else rates.gpu / 100,
            self.memory(gpu),
            _thousandth(self._asked("nvmlDeviceGetPowerUsage", gpu)),
            _thousandth(self._asked("nvmlDeviceGetEnforcedPowerLimit", gpu)),
            _thousandth(self._asked("nvmlDeviceGetTotalEnergyConsumption", gpu)),
        )

    def _asked(self, function: str, gpu: Gpu) -> Any:
        """Return what the library says of a GPU; None where it has no answer, as some GPUs have to some questions."""
        try:
            return getattr(self._nvml, function)(gpu.handle)
        except self._nvml.NVMLError:
            return None


def open_library() -> GpuLibrary:
    """Return the management library. Where a driver is loaded and cannot be asked, the log says why, and what helps."""
    library, why_not = find_library()
    if why_not:
        _log.warning("there is a driver for NVIDIA GPUs, and none is used: %s", why_not)
    return library


def find_library() -> tuple[GpuLibrary, str]:
    """Return the management library; and where a driver is loaded and cannot be asked, why, and what helps."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuLibrary(None), "pip install 'nerite[gpu]'" if driver_is_loaded() else ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuLibrary(None), f"NVML says '{error}'" if driver_is_loaded() else ""
    return GpuLibrary(nvml), ""


def driver_is_loaded() -> bool:
    """Return whether there is a driver for NVIDIA GPUs."""
    return _DRIVER.exists()


def visible_indices(uuids: Sequence[str], visible: str | None) -> list[int]:
    """Return which of the machine's GPUs CUDA finds, in its order. ``visible`` is ``CUDA_VISIBLE_DEVICES``.

    As CUDA reads it: numbers or beginnings of UUIDs, up to the first that names no GPU; nothing where one is named
    twice. Parts of a GPU (``MIG-…``) count as none.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in map(str.strip, visible.split(",")):
        if word.isdecimal():
            found = [int(word)] if int(word) < len(uuids) else []
        else:
            found = [index for index, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


def usable(gpus: Sequence[Gpu], minimum: float) -> list[Gpu]:
    """Return the GPUs of at least this compute capability; the log names the others."""
    for gpu in gpus:
        if gpu.capability < minimum:
            _log.warning(
                "GPU %d (%s) is left alone: its compute capability is %s, below the %s of "
                "--min-supported-compute-capability",
                gpu.number,
                gpu.name,
                gpu.capability,
                minimum,
            )
    return [gpu for gpu in gpus if gpu.capability >= minimum]


def of_this_machine(library: GpuLibrary, environment: Mapping[str, str], minimum: float) -> list[Gpu]:
    """Return the GPUs that models of a process with this environment may be on."""
    return usable(library.gpus(environment.get("CUDA_VISIBLE_DEVICES")), minimum)


def _text(name: str | bytes) -> str:
    # Older versions of the package give bytes.
    return name.decode() if isinstance(name, bytes) else name


def _capability(major: int, minor: int) -> float:
    return float(f"{major}.{minor}")


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
