"""The machine, or the part of it that a container leaves us: processors, memory, disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends import cores
from nerite.backends.python.environment_store import folder
from nerite.cli.doctor.finding import GB, Finding, Level, size
from nerite.observability.machine import CGROUP, MEMINFO, cgroup_limit, memory_sizes, number_in

_LITTLE_MEMORY: Final = GB
_LITTLE_DISK: Final = 5 * GB


class Memory(NamedTuple):
    """In bytes; 0 where it is not known."""

    total: int
    available: int
    limit: int
    """That of the container; 0 where there is none."""
    used: int
    """Of the limit."""


def findings() -> Iterator[Finding]:
    """Yield what is found here."""
    yield Finding(Level.OK, f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield of_cores(cores.usable_cores(), os.cpu_count() or 1, cores.quota())
    yield of_memory(memory())
    yield of_disk(folder(os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", "")))


def of_cores(usable: int, there: int, quota: int) -> Finding:
    """Say how many cores there are for us."""
    if usable < there:
        why = f"a quota of processor time leaves {quota}" if quota == usable else "affinity leaves the others to others"
        return Finding(Level.NOTE, f"{usable} of {there} cores: {why}")
    if usable == 1:
        remedy = "Give it two: the server and a model's worker take turns on one."
        return Finding(Level.NOTE, "1 core", remedy)
    return Finding(Level.OK, f"{usable} cores")


def of_memory(found: Memory) -> Finding:
    """Say how much memory there is for us."""
    total, available = found.total, found.available
    if 0 < found.limit < total:
        total, available = found.limit, min(available, found.limit - found.used)
    if not total:
        return Finding(Level.NOTE, "how much memory there is cannot be read here")
    where = " that the container may use" if total == found.limit else ""
    text = f"{size(available)} free of {size(total)} of memory{where}"
    if available < _LITTLE_MEMORY:
        return Finding(Level.WARNING, text, "Free some, or give more: workers that find none are killed by the system.")
    return Finding(Level.OK, text)


def of_disk(directory: Path) -> Finding:
    """Say whether environments and converted models can be kept where they are kept."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    where = f"environments and converted models are kept in {directory}"
    if not os.access(there, os.W_OK):
        remedy = "Name another directory: NERITE_ENVIRONMENT_DIRECTORY, or --environment-directory."
        return Finding(Level.WARNING, f"{where}, which cannot be written", remedy)
    free = shutil.disk_usage(there).free
    text = f"{where}: {size(free)} free"
    if free < _LITTLE_DISK:
        return Finding(Level.WARNING, text, "Remove old ones: nerite environments --remove --unused-for 30")
    return Finding(Level.OK, text)


def memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """Return what the system says."""
    try:
        sizes = memory_sizes(meminfo)
    except OSError:
        sizes = {"MemTotal": 0, "MemAvailable": 0}
    used = number_in(cgroup / "memory.current") or number_in(cgroup / "memory" / "memory.usage_in_bytes")
    return Memory(sizes["MemTotal"], sizes["MemAvailable"], cgroup_limit(cgroup), used)
