"""The metrics of GPUs, looked at every so often."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nerite.config.options import MetricsOptions
from nerite.observability.exposition import Family, labels
from nerite.observability.gpus import Gpu, GpuLibrary, Readings

SHORTEST: Final = 0.1
"""Seconds from one look to the next: a driver is busy while it is looked at."""
_log = logging.getLogger("nerite.observability")

_GAUGES: Final[tuple[tuple[str, str, Callable[[Readings], float | None]], ...]] = (
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

    def families(self) -> list[Family]:
        """Return the metrics as of the latest look. What a GPU does not tell is left out."""
        rows = [(labels({"gpu_uuid": gpu.uuid}), now) for gpu, now in zip(self._gpus, self._latest, strict=True)]
        gauges = [
            Family(name, text, "gauge", [(of, value) for of, now in rows if (value := read(now)) is not None])
            for name, text, read in _GAUGES
        ]
        consumed = Family(
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

    def _read(self) -> list[Readings]:
        return [self._library.read(gpu) for gpu in self._gpus]
