"""NVIDIA GPUs of the machine and their metrics, read through the driver's management library (NVML).

The library is used through the optional package nvidia-ml-py. It creates no CUDA context and so uses no GPU memory.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.options import MetricsOptions
from nerite.observability.exposition import Metric, MetricTable, Page

_log = logging.getLogger("nerite.observability")

DRIVER_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
"""Exists if a driver is loaded."""


class Gpu(NamedTuple):
    """A GPU. Its number is the one that CUDA gives it in this process, and that instance groups use."""

    number: int
    uuid: str
    name: str
    capability: float
    """Compute capability."""
    handle: Any
    """Handle of the library."""


class GpuDriver(NamedTuple):
    """The driver of the GPUs."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it supports: major and minor version."""


class GpuMemory(NamedTuple):
    """The memory of a GPU, in bytes."""

    total: int
    used: int
    """By all processes."""


class GpuReadings(NamedTuple):
    """Readings of a GPU; None for those that it does not report."""

    utilization: float | None
    """From 0 to 1."""
    memory: GpuMemory | None
    watts: float | None
    watts_allowed: float | None
    joules: float | None
    """Energy consumption since the driver was loaded."""


class GpuLibrary:
    """The management library."""

    def __init__(self, nvml: Any) -> None:
        """``nvml``: the initialized module ``pynvml``; None if no GPU can be used."""
        self._nvml = nvml

    def gpus(self, visible: str | None) -> list[Gpu]:
        """Return the GPUs that CUDA finds if ``CUDA_VISIBLE_DEVICES`` is ``visible`` (None: not set)."""
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

    def driver(self) -> GpuDriver | None:
        """Return the driver; None without GPUs."""
        if self._nvml is None:
            return None
        cuda = self._nvml.nvmlSystemGetCudaDriverVersion()
        return GpuDriver(_text(self._nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))

    def is_divided(self, gpu: Gpu) -> bool:
        """Return whether MIG divides a GPU into several devices."""
        mode = self._call("nvmlDeviceGetMigMode", gpu)
        return mode is not None and mode[0] == self._nvml.NVML_DEVICE_MIG_ENABLE

    def memory(self, gpu: Gpu) -> GpuMemory | None:
        """Return the memory of a GPU; None if it does not report it."""
        info = self._call("nvmlDeviceGetMemoryInfo", gpu)
        return None if info is None else GpuMemory(int(info.total), int(info.used))

    def linked(self, gpu: Gpu, other: Gpu) -> bool:
        """Return whether NVLink connects two GPUs, directly or through switches."""
        nvml = self._nvml
        try:
            status = nvml.nvmlDeviceGetP2PStatus(gpu.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def memory_of_processes(self, gpu: Gpu) -> dict[int, int]:
        """Return the bytes that each process uses on a GPU; empty if it does not report them.

        The ids are those of the machine, which a container does not know.
        """
        found = self._call("nvmlDeviceGetComputeRunningProcesses", gpu) or ()
        return {int(each.pid): int(each.usedGpuMemory) for each in found if each.usedGpuMemory}

    def read(self, gpu: Gpu) -> GpuReadings:
        """Read a GPU. May take some milliseconds."""
        rates = self._call("nvmlDeviceGetUtilizationRates", gpu)
        return GpuReadings(
            None if rates is None else rates.gpu / 100,
            self.memory(gpu),
            _thousandth(self._call("nvmlDeviceGetPowerUsage", gpu)),
            _thousandth(self._call("nvmlDeviceGetEnforcedPowerLimit", gpu)),
            _thousandth(self._call("nvmlDeviceGetTotalEnergyConsumption", gpu)),
        )

    def _call(self, function: str, gpu: Gpu) -> Any:
        """Call a function of the library; return None if this GPU does not support it."""
        try:
            return getattr(self._nvml, function)(gpu.handle)
        except self._nvml.NVMLError:
            return None


def open_library() -> GpuLibrary:
    """Return the management library. Log a warning with a remedy if a driver is loaded that cannot be used."""
    library, why_not = find_library()
    if why_not:
        _log.warning("an NVIDIA driver is loaded, but GPUs cannot be used: %s", why_not)
    return library


def find_library() -> tuple[GpuLibrary, str]:
    """Return the management library, and the remedy or reason if a driver is loaded that cannot be used."""
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
    """Return whether an NVIDIA driver is loaded."""
    return DRIVER_VERSION_FILE.exists()


def visible_indices(uuids: Sequence[str], visible: str | None) -> list[int]:
    """Return the indices of the GPUs that CUDA finds, in its order. ``visible`` is ``CUDA_VISIBLE_DEVICES``.

    Parsed as CUDA does: a list of indices or UUID prefixes that ends before the first that names no GPU, and that is
    empty if a GPU is named twice. Parts of a GPU (``MIG-…``) are not supported.
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
    """Return the GPUs of at least this compute capability; log the others."""
    for gpu in gpus:
        if gpu.capability < minimum:
            _log.warning(
                "GPU %d (%s) is not used: its compute capability %s is below the %s of "
                "--min-supported-compute-capability",
                gpu.number,
                gpu.name,
                gpu.capability,
                minimum,
            )
    return [gpu for gpu in gpus if gpu.capability >= minimum]


def of_this_machine(library: GpuLibrary, environment: Mapping[str, str], minimum: float) -> list[Gpu]:
    """Return the GPUs that models in a process with this environment may use."""
    return usable(library.gpus(environment.get("CUDA_VISIBLE_DEVICES")), minimum)


def _text(name: str | bytes) -> str:
    # Older versions of the package return bytes.
    return name.decode() if isinstance(name, bytes) else name


def _capability(major: int, minor: int) -> float:
    return float(f"{major}.{minor}")


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


SHORTEST: Final = 0.1
"""Minimum seconds between two readings: reading keeps the driver busy."""


class _GpuState(NamedTuple):
    now: GpuReadings
    at_start: GpuReadings


def _consumed(gpu: _GpuState) -> float | None:
    now, before = gpu.now.joules, gpu.at_start.joules
    return None if now is None or before is None else max(now - before, 0)


METRICS: Final = MetricTable[_GpuState]((
    Metric("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.now.utilization),
    Metric("nv_gpu_memory_total_bytes", "gauge",
           "GPU total memory, in bytes", lambda gpu: gpu.now.memory and gpu.now.memory.total),
    Metric("nv_gpu_memory_used_bytes", "gauge",
           "GPU used memory, in bytes", lambda gpu: gpu.now.memory and gpu.now.memory.used),
    Metric("nv_gpu_power_usage", "gauge", "GPU power usage in watts", lambda gpu: gpu.now.watts),
    Metric("nv_gpu_power_limit", "gauge", "GPU power management limit in watts", lambda gpu: gpu.now.watts_allowed),
    Metric("nv_energy_consumption", "counter",
           "GPU energy consumption in joules since the Triton Server started", _consumed),
), labels=("gpu_uuid",), option="gpu")  # fmt: skip


def start_gpu_metrics(
    library: GpuLibrary, gpus: Sequence[Gpu], options: MetricsOptions, environment: Mapping[str, str]
) -> GpuMetrics | None:
    """Start to read GPUs periodically; return None if there are none, or their metrics are disabled."""
    if not gpus or not METRICS.enabled(options) or "TRITON_SERVER_CPU_ONLY" in environment:
        return None
    for gpu in gpus:
        _log.info("Collecting metrics for GPU %d: %s", gpu.number, gpu.name)
    return GpuMetrics(library, gpus, max(options.interval_ms / 1000, SHORTEST))


class GpuMetrics:
    """Reads GPUs in a thread of its own, so that no scrape waits for a slow driver."""

    def __init__(self, library: GpuLibrary, gpus: Sequence[Gpu], interval: float) -> None:
        """Read the GPUs once, then every ``interval`` seconds."""
        self._library = library
        self._gpus = gpus
        self._interval = interval
        self._closed = threading.Event()
        self._at_start = self._latest = self._read()
        self._thread = threading.Thread(target=self._run, name="gpu metrics", daemon=True)
        self._thread.start()

    def write_metrics(self, page: Page) -> None:
        """Write the latest readings. Values that a GPU does not report are left out."""
        states = zip(self._gpus, self._latest, self._at_start, strict=True)
        page.write(METRICS, [METRICS.row(_GpuState(now, at_start), gpu.uuid) for gpu, now, at_start in states])

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._latest = self._read()

    def _read(self) -> list[GpuReadings]:
        return [self._library.read(gpu) for gpu in self._gpus]
