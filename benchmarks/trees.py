"""A forest of 500 trees: milliseconds for a batch, with each way to compute it, in one process.

With the Python package of the library that wrote the model (``inplace_predict``, ``predict``, ``predict_proba``), with
treelite's Python package, and with our engines. All take turns, and the best of many counts. What the server makes of
them is in ``backends.py``.

    python benchmarks/trees.py [--seconds S] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends import written
from page import machine
from zoo.contestant import rows as some_rows
from zoo.trees import OPENED

CORES = (1, 2)
_FILES = {"xgboost": "xgboost.ubj", "lightgbm": "model.txt", "sklearn": "checkpoint.tl"}


def treelites(kind: str, path: str, threads: int) -> Callable[[Any], Any]:
    """Return the prediction of treelite's Python package."""
    import treelite

    readers = {
        "xgboost": treelite.frontend.load_xgboost_model,
        "lightgbm": treelite.frontend.load_lightgbm_model,
        "sklearn": treelite.Model.deserialize,
    }
    model = readers[kind](path)
    return lambda rows: treelite.gtil.predict(model, rows.astype(model.input_type, copy=False), nthread=threads)


def ours(kind: str, path: Path, engine: str, threads: int) -> Callable[[Any], Any]:
    """Return the prediction of an engine of ours."""
    from nerite.frameworks.trees.engines import open_engine
    from nerite.frameworks.trees.forest import Forest, ForestArtifact

    types = {"xgboost": "xgboost_ubj", "lightgbm": "lightgbm", "sklearn": "treelite_checkpoint"}
    forest = Forest(kind, ForestArtifact(path, 0, types[kind]))
    opened = open_engine(kind, forest.description, engine, threads, lambda: forest)
    return lambda rows: opened.predict(rows if rows.dtype in opened.takes else rows.astype(opened.takes[0]))


def engines(seconds: float, rounds: int, folder: Path) -> str:
    """Return the table."""
    lines = [
        "| model | threads | rows | package | treelite's package | own library | onnxruntime | treelite |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, file in _FILES.items():
        path = written(kind, "forest", folder / kind) / file
        for threads in CORES:
            calls = [
                OPENED[kind]("forest", path.parent, threads),
                treelites(kind, str(path), threads),
                ours(kind, path, "auto", threads),
                ours(kind, path, "onnxruntime", threads),
                ours(kind, path, "treelite", threads),
            ]
            for count in (1, 1000):
                rows = some_rows("forest", count)
                times: list[list[float]] = [[] for _ in calls]
                for _ in range(rounds):
                    for call, found in zip(calls, times, strict=True):
                        call(rows)
                        until = time.perf_counter() + seconds / 20
                        while not found or time.perf_counter() < until:
                            began = time.perf_counter()
                            call(rows)
                            found.append(time.perf_counter() - began)
                cells = [f"{min(found) * 1e3:.3g}" for found in times]
                if kind == "sklearn":
                    cells[2] = ""
                lines.append(f"| {kind} | {threads} | {count} | {' | '.join(cells)} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = engines(arguments.seconds, arguments.rounds, Path(directory))
    print(f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds:g} s.\n\n{found}")


if __name__ == "__main__":
    main()
