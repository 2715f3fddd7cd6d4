"""What the system lets a process have: open files, processes, shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nerite.cli.doctor.finding import MB, Finding, Level, size

_FEW_FILES: Final = 4096
_FEW_PROCESSES: Final = 512
_LITTLE_SHARED: Final = 256 * MB
_SHARED: Final = Path("/dev/shm")


def findings() -> Iterator[Finding]:
    """Yield what is found here."""
    yield of_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if hasattr(resource, "RLIMIT_NPROC"):
        yield of_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        yield of_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if _SHARED.is_dir():
        yield of_shared(shutil.disk_usage(_SHARED).total, shutil.disk_usage(_SHARED).free)
    if not hasattr(os, "memfd_create"):
        yield Finding(Level.NOTE, "there is no memfd_create: tensors cross to workers in temporary files")


def of_files(most: int) -> Finding:
    """Say how many files may be open; the server raises its own limit as far as it may, which is ``most``."""
    remedy = "ulimit -Hn 65536, or docker run --ulimit nofile=65536: each connection is an open file."
    return _number("open files", most, _FEW_FILES, remedy)


def of_processes(most: int) -> Finding:
    """Say how many processes and threads there may be."""
    remedy = "ulimit -u unlimited: each worker is a process, and frameworks start threads in each."
    return _number("processes and threads", most, _FEW_PROCESSES, remedy)


def of_locked(most: int) -> Finding:
    """Say how much memory may be locked; nothing of ours wants that."""
    return Finding(Level.OK, f"locked memory: {'unlimited' if most < 0 else size(most)}")


def of_shared(total: int, free: int) -> Finding:
    """Say how much room there is in /dev/shm."""
    text = f"/dev/shm: {size(free)} free of {size(total)}"
    if free < _LITTLE_SHARED:
        remedy = (
            "docker run --shm-size=1g, if clients pass tensors in shared memory, or models run several processes: "
            "the server itself keeps nothing there."
        )
        return Finding(Level.NOTE, text, remedy)
    return Finding(Level.OK, text)


def _number(what: str, most: int, few: int, remedy: str) -> Finding:
    """Say how many there may be of something, and that ``few`` are too few. Below 0: any number."""
    text = f"{what}: {'unlimited' if most < 0 else most}"
    return Finding(Level.WARNING, text, remedy) if 0 <= most < few else Finding(Level.OK, text)
