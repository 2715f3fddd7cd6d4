"""The processor and memory of the machine, as Linux tells them."""

from __future__ import annotations

import os
from pathlib import Path

from nerite.observability.exposition import UNLABELLED, MetricFamily

_STAT = Path("/proc/stat")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class Machine:
    """Reads the machine's state when asked; the load is that since the last time it was asked."""

    def __init__(self) -> None:
        self._busy, self._total = _ticks()
        self._utilization = 0.0

    def families(self) -> list[MetricFamily]:
        """Return the metrics of the machine; none where there is no /proc, or none of its files can be opened now."""
        try:
            memory = memory_sizes()
        except OSError:
            return []
        busy, total = _ticks()
        if total > self._total:
            self._utilization = (busy - self._busy) / (total - self._total)
            self._busy, self._total = busy, total
        used = memory["MemTotal"] - memory["MemAvailable"]
        return [
            MetricFamily(
                "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", "gauge", [(UNLABELLED, self._utilization)]
            ),
            MetricFamily(
                "nv_cpu_memory_total_bytes",
                "CPU total memory (RAM), in bytes",
                "gauge",
                [(UNLABELLED, memory["MemTotal"])],
            ),
            MetricFamily("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", "gauge", [(UNLABELLED, used)]),
        ]


def pinned_pool() -> list[MetricFamily]:
    """Return what Triton tells of its pool of pinned memory where it has none, as there is none here."""
    return [
        MetricFamily(name, f"Pinned memory pool {what} memory size, in bytes", "gauge", [(UNLABELLED, 0)])
        for name, what in (
            ("nv_pinned_memory_pool_total_bytes", "total"),
            ("nv_pinned_memory_pool_used_bytes", "used"),
        )
    ]


def _ticks() -> tuple[int, int]:
    """Return the ticks that all processors worked, and all ticks there were."""
    try:
        with _STAT.open() as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0, os.cpu_count() or 1
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def memory_sizes(file: Path = MEMINFO) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes. Raises ``OSError`` where it is not."""
    sizes = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def cgroup_limit(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that the container may use; 0 where there is no limit."""
    return number_in(cgroup / "memory.max") or number_in(cgroup / "memory" / "memory.limit_in_bytes")


def number_in(file: Path) -> int:
    """Return the number that a file of a cgroup holds; 0 where it is not there, or "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def usable_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that the machine has, or the container may use; 0 where the system does not tell."""
    try:
        total = memory_sizes(meminfo)["MemTotal"]
    except OSError:
        total = 0
    limit = cgroup_limit(cgroup)
    return min(total, limit) if total and limit else total or limit
