"""What processes take of the machine's memory, as far as the system tells."""

from __future__ import annotations

import os
from pathlib import Path


def of(pid: int) -> int:
    """Return the bytes that a process has for itself: no files, and nothing that is shared; 0 where nothing is told."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def of_family(pid: int) -> int:
    """Return those of a process and of all that it has started and that live."""
    return of(pid) + sum(of_family(child) for child in _children(pid))


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
