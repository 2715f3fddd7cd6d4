"""Which processes belong to a worker."""

from __future__ import annotations

from pathlib import Path


def processes_of(worker: int) -> list[int]:
    """Return the processes that a worker has started, and those that they have."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    found = {worker}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {worker})


def lives(pid: int) -> bool:
    """Return whether there is such a process, and not only its end for somebody to see."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def helpers_of(server: int) -> list[int]:
    """Return the processes in which a server has functions called."""
    return [pid for pid in processes_of(server) if name_of(pid) == "helper"]


def ticks_of(pid: int) -> int:
    """Return the ticks of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command, none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def name_of(pid: int) -> str:
    """Return what a process calls itself, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
