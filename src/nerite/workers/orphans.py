"""Ends the orphans of workers: processes that models have started. For the server and its fork server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

# Orphans are ended along with their worker, however that ends.
#
# Theory of operation. The fork server is the subreaper of all that its workers start: a process whose parent has ended
# becomes its child. It belongs to the worker whose process group it is in or, if it has a group of its own, to the
# worker that its environment names. When a worker has ended, its remaining processes get SIGTERM, and SIGKILL if they
# still run after a while; processes that they start meanwhile are found by scanning again.
#
# A worker has a process group of its own, but no session: the kernel distributes processor time by session (autogroup),
# and a worker that polls would not yield to the server that it waits for.
#
# A process that neither tells apart (a group of its own, and an environment that was cleared, or none of its own
# because it was forked without exec) ends with the server. Linux only.
#
# If the fork server itself is killed, the server does the same, by group and environment alone.

MARK: Final = "WORKER_OF_NERITE"
"""Environment variable that names the worker; its child processes inherit it."""
_PATIENCE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_GIVE_UP: Final = 4.0
"""Seconds after which the remaining processes are left alone."""
_POLL_SECONDS: Final = 0.05
_PROC: Final = Path("/proc")


def orphan_mark(fork_server: int, order: int | str) -> str:
    """Return the mark of the worker that a fork server made for ``order``; for "" the common prefix of all marks."""
    return f"{fork_server}-{order}"


class OrphanEnding:
    """Ends a set of processes that may still grow."""

    def __init__(self, find: Callable[[], Collection[int]]) -> None:
        """``find`` returns the processes that exist now."""
        self._find = find
        self._began = time.monotonic()
        self._told: set[int] = set()

    def poll(self) -> bool:
        """Signal the processes that exist; return whether to look again."""
        there = self._find()
        passed = time.monotonic() - self._began
        for pid in there:
            if passed > _PATIENCE:
                _signal(pid, signal.SIGKILL)
            elif pid not in self._told:
                self._told.add(pid)
                _signal(pid, signal.SIGTERM)
        return bool(there) and passed < _GIVE_UP


class OrphanReaper:
    """Ends the orphans of workers that have ended. For the process that is the subreaper."""

    def __init__(self, workers: Collection[int]) -> None:
        """``workers`` are the live ones, each with a process group of its own."""
        self._workers = workers
        self._ending: list[OrphanEnding] = []

    @property
    def pause(self) -> float | None:
        """Seconds until the next call of ``poll``; None if none is needed."""
        return _POLL_SECONDS if self._ending else None

    def end(self, worker: int, mark: str) -> None:
        """End the orphans of a worker that has ended, identified by its process id and its mark."""
        named = f"{MARK}={mark}".encode()

        def find() -> list[int]:
            found = _descendants(os.getpid())
            return [
                pid
                for pid, group in found.items()
                if group == worker or (group not in self._workers and named in _environment(pid))
            ]

        self._ending.append(OrphanEnding(find))
        self.poll()

    def poll(self) -> None:
        """Continue with all unfinished endings."""
        self._ending = [each for each in self._ending if each.poll()]


def end_all() -> None:
    """End all descendants of this process. Blocks for some seconds at most."""
    ending = OrphanEnding(lambda: _descendants(os.getpid()))
    while ending.poll():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def end_those_of(fork_server: int, workers: Collection[int]) -> None:
    """End the orphans of workers whose fork server was killed. Blocks for some seconds at most.

    Their new parents are unknown, so all processes are scanned.
    """
    named = f"{MARK}={orphan_mark(fork_server, '')}".encode()

    def find() -> list[int]:
        _, groups = _processes()
        return [
            pid
            for pid, group in groups.items()
            if group in workers or any(entry.startswith(named) for entry in _environment(pid))
        ]

    ending = OrphanEnding(find)
    while ending.poll():
        time.sleep(_POLL_SECONDS)


def _processes() -> tuple[dict[int, int], dict[int, int]]:
    """Return the parents of all processes, and the process groups of those that have not ended."""
    parents: dict[int, int] = {}
    groups: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                pid = int(folder.name)
                parents[pid] = int(parent)
                if state not in "ZX":
                    groups[pid] = int(group)
    return parents, groups


def _descendants(ancestor: int) -> dict[int, int]:
    """Return the descendants of a process that have not ended, each with its process group."""
    parents, groups = _processes()
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: group for pid, group in groups.items() if pid in found and pid != ancestor}


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
