"""Files in the folder that processes share: whose they are, and which of them belong to processes that live.

- ``0-123-1``: memory that process 123 allocated on GPU 0.
- ``mapping-456-0-123-1``: process 456 has opened the handle of that memory.
- ``event-123-1``: an event of process 123 that other processes may open.
- ``counts-123``: what process 123 did. Stays when the process has ended.
- ``lock``: held by a process that allocates.

Needs nothing but the standard library, and is imported by the stand-in as well as by tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ALLOCATION = "allocation"
MAPPING = "mapping"
EVENT = "event"

_NAMES = {
    ALLOCATION: re.compile(r"(?P<device>\d+)-(?P<pid>\d+)-\d+"),
    MAPPING: re.compile(r"mapping-(?P<pid>\d+)-(?P<device>\d+)-\d+-\d+"),
    EVENT: re.compile(r"event-(?P<pid>\d+)-\d+"),
}

COUNTERS = (
    "copies_to_device",
    "bytes_to_device",
    "copies_to_host",
    "bytes_to_host",
    "copies_on_device",
    "bytes_on_device",
    "copies_peer",
    "bytes_peer",
    "allocations",
    "frees",
    "live_bytes",
    "handles_opened",
    "handles_closed",
    "pinned_allocations",
    "pinned_frees",
    "streams_created",
    "streams_destroyed",
    "events_created",
    "events_destroyed",
)
"""What the int64s of a file of counts are, in this order."""


class Held(NamedTuple):
    """What a process holds."""

    kind: str
    """``allocation``, ``mapping`` or ``event``."""
    pid: int
    device: int
    """Its GPU; -1 for an event."""
    size: int
    name: str
    """Name of its file."""


def is_alive(pid: int) -> bool:
    """Return whether a process lives. One that has ended, but was not waited for, does not."""
    try:
        state = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def held(folder: Path) -> Iterator[Held]:
    """Yield what living processes hold, and remove what those left that have ended."""
    lives: dict[int, bool] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            parsed = _parse(entry.name)
            if parsed is None:
                continue
            kind, pid, device = parsed
            if pid not in lives:
                lives[pid] = is_alive(pid)
            try:
                if lives[pid]:
                    yield Held(kind, pid, device, entry.stat().st_size, entry.name)
                else:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue  # freed in between


def _parse(name: str) -> tuple[str, int, int] | None:
    """Return the kind of a file, whose it is and the GPU; None if it has another name."""
    for kind, pattern in _NAMES.items():
        if match := pattern.fullmatch(name):
            return kind, int(match["pid"]), int(match.groupdict().get("device", -1))
    return None


def remove(folder: Path, pid: int) -> None:
    """Remove what a process holds."""
    for each in list(held(folder)):
        if each.pid == pid:
            (folder / each.name).unlink(missing_ok=True)
