"""The processes that models have started: they end when the worker ends that they belong to, however that ends.

Theory of operation. The template is the subreaper of all that its workers start: a process whose parent has ended is
the template's child. It belongs to the worker whose process group it is in or, if it has begun a group of its own, to
the worker that its environment names. When a worker has ended, what is left of it gets SIGTERM, and SIGKILL if it is
there after a while; what it starts meanwhile is found by looking again.

A worker has a process group of its own, but no session: the kernel shares processor time out by session (autogroup),
and a worker that polls would not give way to the server that it waits for.

A process of which neither is known any more (a group of its own, and an environment that was cleared, or none of its
own because it has forked without another program) ends with the server. Linux only.

If the template itself is killed, the server does what it would have done, by group and environment alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

MARK: Final = "WORKER_OF_NERITE"
"""The variable that names the worker, in its environment and in those that inherit it."""
_PATIENCE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_GIVE_UP: Final = 4.0
"""Seconds after which what is left cannot be ended."""
_LOOK_AGAIN: Final = 0.05
_PROC: Final = Path("/proc")


def mark_of(template: int, order: int | str) -> str:
    """Return the mark of the worker that a template has made by this order; for "" what those of all begin with."""
    return f"{template}-{order}"


class Ending:
    """The end of some processes, of which there may be more each time that it looks."""

    def __init__(self, find: Callable[[], Collection[int]]) -> None:
        """``find`` returns those that there are."""
        self._find = find
        self._began = time.monotonic()
        self._told: set[int] = set()

    def look(self) -> bool:
        """Signal what is there; return whether to look again."""
        there = self._find()
        passed = time.monotonic() - self._began
        for pid in there:
            if passed > _PATIENCE:
                _signal(pid, signal.SIGKILL)
            elif pid not in self._told:
                self._told.add(pid)
                _signal(pid, signal.SIGTERM)
        return bool(there) and passed < _GIVE_UP


class Orphans:
    """What is left of workers that have ended. For the process that is the subreaper."""

    def __init__(self, workers: Collection[int]) -> None:
        """``workers`` are those that live, each with a group of its own."""
        self._workers = workers
        self._ending: list[Ending] = []

    @property
    def pause(self) -> float | None:
        """Seconds until ``look`` is to be called; None if there is nothing to look for."""
        return _LOOK_AGAIN if self._ending else None

    def end(self, worker: int, mark: str) -> None:
        """End what belongs to a worker that has ended, known by its number and by its mark."""
        named = f"{MARK}={mark}".encode()

        def find() -> list[int]:
            found = _descendants(os.getpid())
            return [
                pid
                for pid, group in found.items()
                if group == worker or (group not in self._workers and named in _environment(pid))
            ]

        self._ending.append(Ending(find))
        self.look()

    def look(self) -> None:
        """Go on with what was begun."""
        self._ending = [each for each in self._ending if each.look()]


def end_all() -> None:
    """End all that this process and its children have started. Blocks for some seconds at most."""
    ending = Ending(lambda: _descendants(os.getpid()))
    while ending.look():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_AGAIN)


def end_those_of(template: int, workers: Collection[int]) -> None:
    """End what workers have started whose template has ended without ending it. Blocks for some seconds at most.

    Who has them for children now is not known, so all processes are looked at.
    """
    named = f"{MARK}={mark_of(template, '')}".encode()

    def find() -> list[int]:
        _, groups = _processes()
        return [
            pid
            for pid, group in groups.items()
            if group in workers or any(entry.startswith(named) for entry in _environment(pid))
        ]

    ending = Ending(find)
    while ending.look():
        time.sleep(_LOOK_AGAIN)


def _processes() -> tuple[dict[int, int], dict[int, int]]:
    """Return all processes with their parents, and those that have not ended with their groups."""
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
    """Return the processes that come from one and have not ended, each with its group."""
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
