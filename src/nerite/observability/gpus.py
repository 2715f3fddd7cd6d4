"""The NVIDIA GPUs of the machine, as the driver's management library (NVML) tells them.

It is asked through the package nvidia-ml-py, where that is installed. Asking makes no CUDA context, and so takes none
of a GPU's memory.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.options import MetricsOptions
from nerite.observability.exposition import MetricFamily, labels

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


class GpuMemory(NamedTuple):
    """The memory of a GPU, in bytes."""

    total: int
    used: int
    """By whatever process."""


class GpuReadings(NamedTuple):
    """What a GPU is doing. What it cannot tell is None."""

    utilization: float | None
    """From 0 to 1."""
    memory: GpuMemory | None
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

    def memory(self, gpu: Gpu) -> GpuMemory | None:
        """Return the memory of a GPU; None where it does not tell."""
        info = self._asked("nvmlDeviceGetMemoryInfo", gpu)
        return None if info is None else GpuMemory(int(info.total), int(info.used))

    def read(self, gpu: Gpu) -> GpuReadings:
        """Return what a GPU is doing. May take some milliseconds."""
        rates = self._asked("nvmlDeviceGetUtilizationRates", gpu)
        return GpuReadings(
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


# The metrics of GPUs, looked at every so often.

SHORTEST: Final = 0.1
"""Seconds from one look to the next: a driver is busy while it is looked at."""

_GAUGES: Final[tuple[tuple[str, str, Callable[[GpuReadings], float | None]], ...]] = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", lambda r: r.utilization),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", lambda r: r.memory and r.memory.total),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", lambda r: r.memory and r.memory.used),
    ("nv_gpu_power_usage", "GPU power usage in watts", lambda r: r.watts),
    ("nv_gpu_power_limit", "GPU power management limit in watts", lambda r: r.watts_allowed),
)


def gauges_of(
    library: GpuLibrary, gpus: Sequence[Gpu], options: MetricsOptions, environment: Mapping[str, str]
) -> GpuGauges | None:
    """Begin to look at GPUs, if there are some and they are to be reported."""
    if not gpus or not options.gpu or "TRITON_SERVER_CPU_ONLY" in environment:
        return None
    for gpu in gpus:
        _log.info("Collecting metrics for GPU %d: %s", gpu.number, gpu.name)
    return GpuGauges(library, gpus, max(options.interval_ms / 1000, SHORTEST))


class GpuGauges:
    """Reads GPUs in a thread of its own: a driver may take its time, and no scrape waits for it."""

    def __init__(self, library: GpuLibrary, gpus: Sequence[Gpu], interval: float) -> None:
        """``interval``: seconds from one look to the next. The first look is taken here."""
        self._library = library
        self._gpus = gpus
        self._interval = interval
        self._closed = threading.Event()
        self._latest = self._read()
        self._joules_before = [readings.joules for readings in self._latest]
        self._thread = threading.Thread(target=self._look, name="gpu gauges", daemon=True)
        self._thread.start()

    def families(self) -> list[MetricFamily]:
        """Return the metrics as of the latest look. What a GPU does not tell is left out."""
        rows = [(labels({"gpu_uuid": gpu.uuid}), now) for gpu, now in zip(self._gpus, self._latest, strict=True)]
        gauges = [
            MetricFamily(name, text, "gauge", [(of, value) for of, now in rows if (value := read(now)) is not None])
            for name, text, read in _GAUGES
        ]
        consumed = MetricFamily(
            "nv_energy_consumption",
            "GPU energy consumption in joules since the Triton Server started",
            "counter",
            [
                (of, max(now.joules - before, 0))
                for (of, now), before in zip(rows, self._joules_before, strict=True)
                if now.joules is not None and before is not None
            ],
        )
        return [*gauges, consumed]

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(self._interval):
            self._latest = self._read()

    def _read(self) -> list[GpuReadings]:
        return [self._library.read(gpu) for gpu in self._gpus]
