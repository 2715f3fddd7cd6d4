"""The ports that a server would open, and who has them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from nerite.cli.doctor.finding import Finding, Level

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
"""The state of a socket that listens, as the kernel writes it."""


class Owner(NamedTuple):
    """A process."""

    pid: int
    command: str


def findings(ports: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Yield what is found about each port: the flag that says it, and its number."""
    for flag, port in ports:
        refused = _refusal(port)
        if refused == errno.EADDRINUSE:
            remedy = f"Stop that, or have the server listen elsewhere: {flag}=PORT (0 takes a free one)."
            yield Finding(Level.WARNING, f"port {port} is in use{_by(owner_of(port))}", remedy)
        elif refused:
            remedy = f"Ports below 1024 want privileges; or have the server listen elsewhere: {flag}=PORT."
            yield Finding(Level.PROBLEM, f"port {port} cannot be opened: {os.strerror(refused)}", remedy)
        else:
            yield Finding(Level.OK, f"port {port} is free ({flag})")


def _refusal(port: int) -> int:
    """Return the number of the error with which a port cannot be opened; 0 if it can be."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def _by(owner: Owner | None) -> str:
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
