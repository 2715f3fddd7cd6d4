"""Files without a name, in memory: no disk is too full for them, and they go with the last process that has them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def memory_file(size: int = 0) -> int:
    """Return the descriptor of a file of ``size`` bytes. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nerite", os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# What processes take of the machine's memory, as far as the system tells.


def memory_of(pid: int) -> int:
    """Return the bytes that a process has for itself: no files, and nothing that is shared; 0 where nothing is told."""
    try:
        hosted, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(hosted) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def memory_of_family(pid: int) -> int:
    """Return those of a process and of all that it has started and that live."""
    return memory_of(pid) + sum(memory_of_family(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _of_thread(task)]
    except OSError:
        return []


def _of_thread(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # It has ended.
        return []
