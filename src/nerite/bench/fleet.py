"""The generators, each a process: they are told the same, and what they report is put together."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from nerite.bench.generator.process import Begin, End, Report, Take, run
from nerite.bench.plan import Level, Plan
from nerite.bench.records import Records
from nerite.client import ClientError

_PATIENCE = 10.0


class Taken(NamedTuple):
    """What all generators report."""

    records: Records
    spent: tuple[float, ...]
    """Seconds of processor time that each has used so far."""


class Fleet:
    """A context manager; the processes end with it."""

    def __init__(self, plan: Plan, size: int = 1) -> None:
        self._plan = plan
        self._size = size
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Fleet:
        context = multiprocessing.get_context("spawn")
        for share in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run, args=(self._plan, share, self._size, theirs), name=f"bench {share}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def begin(self, level: Level) -> None:
        """Put on a load."""
        self._tell(Begin(level))

    def take(self) -> Taken:
        """Return what has happened since the last time."""
        reports: list[Report] = self._tell(Take())
        return Taken(Records.joined([report.records for report in reports]), tuple(each.spent for each in reports))

    def end(self) -> None:
        """Take the load off."""
        self._tell(End())

    def _tell(self, command: object) -> list[Any]:
        """Send a command to all; return their answers."""
        try:
            for pipe in self._pipes:
                pipe.send(command)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise ClientError("a process that puts on the load has died") from error
