"""Who has a port that cannot be had: the process that listens there, as far as the system tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
"""The state of a socket that listens, as the kernel writes it."""


class Owner(NamedTuple):
    """A process."""

    pid: int
    command: str


def used_by(port: int) -> str:
    """Return who has a port, as it goes on after "in use"."""
    owner = owner_of(port)
    return " by a process of another user or container" if owner is None else f" by {owner.command} (pid {owner.pid})"


def owner_of(port: int, proc: Path = _PROC) -> Owner | None:
    """Return the process that listens on a port, if it may be known."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    links = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir() if links else ():
        if folder.name.isdecimal():
            try:
                if any(os.readlink(each) in links for each in (folder / "fd").iterdir()):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    return Owner(int(folder.name), " ".join(os.fsdecode(word) for word in words[:4] if word))
            except OSError:  # somebody else's, or gone meanwhile
                continue
    return None


def _listening(table: Path, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]
