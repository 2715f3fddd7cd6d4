"""Anonymous files in memory (memfd), and the memory use of processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple


class OwnMemory(NamedTuple):
    """What a model takes of the memory of the server's own process, in bytes."""

    size: int = 0
    estimated: bool = False
    """By the size of its files, because the process has grown by less during the load: it maps files, or used memory
    again that it had freed."""

    @classmethod
    def of_load(cls, growth: int, files: int) -> OwnMemory:
        """Return what a model takes by whose load the process has grown, and that has files of a size."""
        return cls(max(growth, files), growth < files)


def memory_file(size: int = 0, name: str = "nerite") -> int:
    """Return the descriptor of an anonymous file of ``size`` bytes. Raises ``OSError``.

    It needs no disk space, and is freed when the last process closes it. ``/proc`` shows its name; tensors have the
    default one.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def memory_of(pid: int) -> int:
    """Return the private resident bytes of a process, without files and shared memory; 0 if the OS does not say."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def memory_of_family(pid: int) -> int:
    """Return the private resident bytes of a process and all its living descendants."""
    return memory_of(pid) + sum(memory_of_family(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children_of_thread(task)]
    except OSError:
        return []


def _children_of_thread(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # the thread has ended
        return []


def resident_of(pid: int) -> int:
    """Return the resident bytes of a process without shared memory: its own, and the files that it has mapped.

    Pages that it shares with others count in part (the proportional set size), where the OS says so.
    """
    try:
        fields = _fields_of(f"/proc/{pid}/smaps_rollup")
        return fields["Pss"] - fields.get("Pss_Shmem", 0)
    except (OSError, KeyError, ValueError):
        return memory_of(pid)


def resident_of_family(pid: int) -> int:
    """Return ``resident_of`` a process and all its living descendants."""
    return resident_of(pid) + sum(resident_of_family(child) for child in _children(pid))


def _fields_of(file: str) -> dict[str, int]:
    """Return the sizes in a file of ``/proc``, in bytes."""
    found = {}
    for line in Path(file).read_text().splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found
