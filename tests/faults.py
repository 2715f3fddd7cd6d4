"""What tests of faults share: a server of which others want something meanwhile, and what may be left of a fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from process_family import processes_of
from serving import Serving

LONGEST = 10.0
"""Seconds within which whoever has nothing to do with a fault is answered, however busy the machine."""


class Bystanders:
    """Who ask for the server's health, and a model that is well, as long as the block lasts: all are answered."""

    def __init__(self, server: Serving, model: str = "other") -> None:
        self.answered = 0
        self.longest = 0.0
        self._server = server
        self._model = model
        self._wrong: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in (self._health, self._infer)]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if kind is None:
            assert self._wrong == []
            assert self.answered
            assert self.longest < LONGEST

    def _ask(self, one: Callable[[float], None]) -> None:
        number = 0.0
        while True:
            began = time.monotonic()
            try:
                one(number)
            except Exception as error:  # whatever it is, the test is to tell of it
                self._wrong.append(repr(error))
                return
            self.longest = max(self.longest, time.monotonic() - began)
            self.answered += 1
            number += 1
            if self._over.wait(0.01):
                return

    def _health(self, _number: float) -> None:
        assert self._server.ask("GET", "/v2/health/live")[0] == 200
        self._server.ready()

    def _infer(self, number: float) -> None:
        assert self._server.infer(self._model, [number]) == [number]


def family(server: Serving) -> list[int]:
    """Return the server's process, and all that it has started."""
    return [server.process.pid, *processes_of(server.process.pid)]


def descriptors(server: Serving) -> dict[int, int]:
    """Return how many files the server, and each process that it has started, has open."""
    found = {}
    for pid in family(server):
        try:
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has ended
            continue
    return found


FRONTS = int(os.environ.get("NERITE_FRONT_PROCESSES", "1"))
"""How many processes have connections, each of which opens some files with its first connection and large request."""


def files_in(folder: str, server: Serving) -> list[str]:
    """Return the files below a folder that the server's processes have open, or map."""
    found = set()
    for pid in family(server):
        try:
            found |= {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(each for each in found if each.startswith(folder))


def tensor_memory(server: Serving) -> int:
    """Return the bytes that tensors take in the memory which the server shares with its workers."""
    sizes = {}
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        try:
            if os.readlink(each).startswith("/memfd:nerite"):
                status = each.stat()
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:  # it was closed meanwhile
            continue
    return sum(sizes.values())


def resident(server: Serving, *others: int) -> int:
    """Return the bytes of memory that the server's process and others have, shared ones included."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (server.process.pid, *others))
    return pages * os.sysconf("SC_PAGE_SIZE")


def mounted(place: Path | str, size: str, then: str = "true") -> Sequence[str]:
    """Return the command that gives another one a small file system of its own at some place, which ``then`` fills."""
    script = f'mount -t tmpfs -o size={size} tmpfs "{place}" && {then} && exec "$0" "$@"'
    return "unshare", "--map-root-user", "--mount", "sh", "-c", script


def needs_mounts(place: Path) -> None:
    """Skip the test where this user may not do what ``mounted`` does."""
    if shutil.which("unshare") is None or subprocess.run([*mounted(place, "1m"), "true"], check=False).returncode:
        pytest.skip("this user may not mount a small file system in a namespace of its own")


def seen(server: Serving, path: Path | str) -> Path:
    """Return where the test finds a file of the server's own file systems."""
    return Path(f"/proc/{server.process.pid}/root{path}")
