"""A framework's own loop in a process of its own: how many rows a second one thread computes.

    python benchmarks/bare_loop.py CONTESTANT MODEL FOLDER BATCH [ANSWER]

Opens what the contestant wrote into the folder. For each line on its input, a number of seconds, it computes for so
long and prints the rows a second. ``ANSWER`` is a file for what it computes, to compare a server with.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from zoo import CONTESTANTS
from zoo.contestant import rows


class BareLoop:
    """The loop, from another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, seconds: float) -> float:
        """Have it compute, and return its rows a second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def bare_loop(contestant: str, version: Path, batch: int, *answer: Path) -> Iterator[BareLoop]:
    """Start the loop; it is warm when this returns."""
    arguments = [contestant, version.parent.name, version, batch, *answer]
    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        loop = BareLoop(process)
        loop.rate(0)
        yield loop


def main() -> None:
    """Warm up, and compute when asked to."""
    name, model, folder, batch, *answer = sys.argv[1:]
    warnings.simplefilter("ignore")
    call, given = CONTESTANTS[name].opened(model, Path(folder)), rows(model, int(batch))
    for _ in range(5):
        computed = call(given)
    if answer:
        np.save(answer[0], np.asarray(computed))
    for line in sys.stdin:
        calls, began = 0, time.perf_counter()
        until = began + float(line)
        while (now := time.perf_counter()) < until or not calls:
            call(given)
            calls += 1
        print(calls * int(batch) / (now - began or 1), flush=True)


if __name__ == "__main__":
    main()
