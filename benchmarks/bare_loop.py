"""A framework's own loop in a process of its own: prints how many rows a second one thread computes.

    python benchmarks/bare_loop.py CONTESTANT MODEL FOLDER BATCH SECONDS [ANSWER]

``ANSWER`` is a file for what it computes, to compare a server with.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import numpy as np
from zoo import CONTESTANTS
from zoo.contestant import rows


def main() -> None:
    """Warm up, and count for so many seconds."""
    name, model, folder, batch, seconds, *answer = sys.argv[1:]
    warnings.simplefilter("ignore")
    call, given = CONTESTANTS[name].opened(model, Path(folder)), rows(model, int(batch))
    for _ in range(5):
        computed = call(given)
    if answer:
        np.save(answer[0], np.asarray(computed))
    calls, began = 0, time.perf_counter()
    until = began + float(seconds)
    while (now := time.perf_counter()) < until:
        call(given)
        calls += 1
    print(calls * int(batch) / (now - began))


if __name__ == "__main__":
    main()
