"""Processor and memory of the machine, as Linux reports them, and their metrics."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

from nerite.observability.exposition import UNLABELLED, Metric, MetricTable, Page

_STAT = Path("/proc/stat")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class _MachineState(NamedTuple):
    utilization: float
    memory: int
    used: int


MACHINE: Final = MetricTable[_MachineState]((
    Metric("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", lambda state: state.utilization),
    Metric("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", lambda state: state.memory),
    Metric("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", lambda state: state.used),
), option="cpu")  # fmt: skip


class CpuUtilization:
    """How busy the processors of the machine were between two readings."""

    def __init__(self) -> None:
        self._busy, self._total = _ticks()
        self._utilization = 0.0

    def since_last(self) -> float:
        """Return the fraction of their time for which they were busy; the last one again if no time has passed."""
        busy, total = _ticks()
        if total > self._total:
            self._utilization = (busy - self._busy) / (total - self._total)
            self._busy, self._total = busy, total
        return self._utilization


class MachineMetrics:
    """Writes the metrics of the machine. The utilization is that since the last time they were written."""

    def __init__(self) -> None:
        self._processors = CpuUtilization()

    def write_metrics(self, page: Page) -> None:
        """Write the metrics; none if the files in /proc are missing or cannot be opened now."""
        try:
            memory = memory_sizes()
        except OSError:
            return
        used = memory["MemTotal"] - memory["MemAvailable"]
        state = _MachineState(self._processors.since_last(), memory["MemTotal"], used)
        page.write(MACHINE, [(UNLABELLED, state)])


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each connection needs one, and 1,024 is common."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS rejects the hard limit that it reports as unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _ticks() -> tuple[int, int]:
    """Return the number of clock ticks in which processors were busy, and of all ticks."""
    try:
        with _STAT.open() as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0, os.cpu_count() or 1
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def memory_sizes(file: Path = MEMINFO) -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes. Raises ``OSError`` if it cannot be read."""
    sizes = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def cgroup_limit(cgroup: Path = CGROUP) -> int:
    """Return the memory limit of the container in bytes; 0 if there is none."""
    return number_in(cgroup / "memory.max") or number_in(cgroup / "memory" / "memory.limit_in_bytes")


def number_in(file: Path) -> int:
    """Return the number in a file of a cgroup; 0 if the file is missing or says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that processes can still take, on the machine and in the container; 0 if unknown."""
    try:
        available = memory_sizes(meminfo)["MemAvailable"]
    except OSError:
        return 0
    limit = cgroup_limit(cgroup)
    if not limit:
        return available
    used = number_in(cgroup / "memory.current") or number_in(cgroup / "memory" / "memory.usage_in_bytes")
    return min(available, max(limit - used + _inactive_files(cgroup), 0))


def _inactive_files(cgroup: Path) -> int:
    """Return the bytes of cached files that the container can drop."""
    for file in (cgroup / "memory.stat", cgroup / "memory" / "memory.stat"):
        try:
            lines = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(lines.get("total_inactive_file") or lines.get("inactive_file", "0"))
    return 0


def usable_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory of the machine, or the limit of the container if less; 0 if unknown."""
    try:
        total = memory_sizes(meminfo)["MemTotal"]
    except OSError:
        total = 0
    limit = cgroup_limit(cgroup)
    return min(total, limit) if total and limit else total or limit
