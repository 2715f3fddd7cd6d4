"""Counts of one process, which other processes can read."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from cuda.stand_in.files import COUNTERS

_PLACES = {name: place for place, name in enumerate(COUNTERS)}


def shared_words(file: Path, count: int, flags: int) -> memoryview[int]:
    """Return int64s that are in a file; ``flags`` say how it is opened, and if it is created."""
    descriptor = os.open(file, flags | os.O_RDWR, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, 8 * count)
        return memoryview(mmap.mmap(descriptor, 8 * count)).cast("q")
    finally:
        os.close(descriptor)


class Counters:
    """What the process did, as ``files.COUNTERS`` names it; in a file if there is a folder. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        count = len(COUNTERS)
        self._lock = threading.Lock()
        self._words = memoryview(bytearray(8 * count)).cast("q")
        if folder is not None:
            self._words = shared_words(folder / f"counts-{os.getpid()}", count, os.O_CREAT)

    def add(self, name: str, value: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._words[_PLACES[name]] += value

    def add_copy(self, direction: str, size: int) -> None:
        """Count a copy and its bytes."""
        place = _PLACES["copies_" + direction]
        with self._lock:
            self._words[place] += 1
            self._words[place + 1] += size

    def __getitem__(self, name: str) -> int:
        return self._words[_PLACES[name]]
