"""Forests of 500 trees: what each engine needs for a batch, and what the server makes of it under saturation.

The first table is of one process: milliseconds for a batch, with the Python package of the library that wrote the model
(``inplace_predict``, ``predict``, ``predict_proba``), with treelite's Python package, and with our engines. All take
turns, and the best of many counts.

The second is of the server with one instance of one thread, beside a bare loop of the fastest of these calls in a
process of its own, as in ``onnx_served.py``: ``whole`` requests carry a batch, ``joined`` ones a row, and the dynamic
batcher makes the batches.

    python benchmarks/trees.py [--seconds S] [--rounds N] [--only TABLE]
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from contestants import nerite
from loads import need, write_http, wrk
from page import machine

TREES, FEATURES, CORES = 500, 30, (1, 2)
_CONFIG = """
backend: "fil"
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "cpu_nthread" value: {{ string_value: "1" }} }}
"""
_BARE = f"""
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[5])
from trees import packaged
call = packaged(sys.argv[1], sys.argv[2], 1)
rows = np.random.default_rng(1).standard_normal((int(sys.argv[3]), {FEATURES}), np.float32)
for _ in range(3):
    call(rows)
calls, began = 0, time.perf_counter()
while time.perf_counter() - began < float(sys.argv[4]):
    call(rows)
    calls += 1
print(calls * len(rows) / (time.perf_counter() - began))
"""

FILES = {"xgboost": "xgboost.ubj", "lightgbm": "model.txt", "sklearn": "checkpoint.tl"}


@cache
def train(kind: str, folder: Path) -> Path:
    """Train a model, and return its file."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((8000, FEATURES), np.float32)
    classes = (rows[:, :10].sum(1) + rows[:, 10] * rows[:, 11] + random.standard_normal(8000) > 0).astype(int)
    path = folder / kind / "1" / FILES[kind]
    path.parent.mkdir(parents=True)
    if kind == "xgboost":
        import xgboost

        options = {"objective": "binary:logistic", "max_depth": 6, "eta": 0.05}
        xgboost.train(options, xgboost.DMatrix(rows, classes), TREES).save_model(path)
    elif kind == "lightgbm":
        import lightgbm

        options = {"objective": "binary", "num_leaves": 63, "learning_rate": 0.05, "verbosity": -1}
        lightgbm.train(options, lightgbm.Dataset(rows, classes), TREES).save_model(path)
    else:
        import treelite
        from sklearn.ensemble import RandomForestClassifier

        forest = RandomForestClassifier(TREES, max_depth=8, random_state=0).fit(rows, classes)
        treelite.sklearn.import_model(forest).serialize(path)
        path.with_name("forest.pkl").write_bytes(pickle.dumps(forest))
    return path


def packaged(kind: str, path: str, threads: int) -> Callable[[Any], Any]:
    """Return the prediction of the Python package that a user would call in a loop."""
    if kind == "xgboost":
        import xgboost

        booster = xgboost.Booster({"nthread": threads}, model_file=path)
        return lambda rows: booster.inplace_predict(rows, validate_features=False)
    if kind == "lightgbm":
        import lightgbm

        model = lightgbm.Booster(model_file=path)
        return lambda rows: model.predict(rows, num_threads=threads)
    forest = pickle.loads(Path(path).with_name("forest.pkl").read_bytes())
    forest.n_jobs = threads
    return forest.predict_proba


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
    from nerite.backends.trees.artifact import Artifact
    from nerite.backends.trees.engines.choice import open_engine
    from nerite.backends.trees.forest import Forest

    types = {"xgboost": "xgboost_ubj", "lightgbm": "lightgbm", "sklearn": "treelite_checkpoint"}
    forest = Forest(kind, Artifact(path, 0, types[kind]))
    opened = open_engine(kind, forest.description, engine, threads, lambda: forest)
    return lambda rows: opened.predict(rows if rows.dtype in opened.takes else rows.astype(opened.takes[0]))


def engines(seconds: float, rounds: int, folder: Path) -> str:
    """Return the first table."""
    lines = [
        "| model | threads | rows | package | treelite's package | own library | onnxruntime | treelite |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in FILES:
        path = train(kind, folder)
        for threads in CORES:
            calls = [
                packaged(kind, str(path), threads),
                treelites(kind, str(path), threads),
                ours(kind, path, "auto", threads),
                ours(kind, path, "onnxruntime", threads),
                ours(kind, path, "treelite", threads),
            ]
            for count in (1, 1000):
                rows = np.random.default_rng(1).standard_normal((count, FEATURES), np.float32)
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


def served(seconds: float, rounds: int, folder: Path) -> str:
    """Return the second table."""
    lines = [
        "| model | batch | bare loop, rows/s | whole batches | ratio | joined rows | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in FILES:
        path = train(kind, folder)
        for batch in (8, 32, 256):
            rates = _rates(kind, path, batch, seconds, rounds)
            bare, whole, joined = (statistics.median(rates[name]) for name in ("bare", "whole", "joined"))
            cells = f"{whole:,.0f} | **{whole / bare:.2f}** | {joined:,.0f} | **{joined / bare:.2f}**"
            lines.append(f"| {kind} | {batch} | {bare:,.0f} | {cells} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def _rates(kind: str, path: Path, batch: int, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Serve one model, and let the loop and the two kinds of requests take turns."""
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "joined": []}
    rows = np.random.default_rng(1).standard_normal((batch, FEATURES), np.float32)
    (path.parents[1] / "config.pbtxt").write_text(_CONFIG.format(batch=batch))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "models").mkdir()
        (folder / "models" / kind).symlink_to(path.parents[1])
        write_http(folder, "whole", ("input__0", [batch, FEATURES], rows.tobytes()), "output__0")
        write_http(folder, "joined", ("input__0", [1, FEATURES], rows[:1].tobytes()), "output__0")
        command = [sys.executable, "-c", _BARE, kind, str(path), str(batch), str(seconds), str(Path(__file__).parent)]
        with nerite("Nerite", folder / "models", folder) as server:
            # Two or three batches in the server at any time: one computes, the next is ready when it ends.
            whole = wrk(folder, "whole", 3, seconds, kind)
            joined = wrk(folder, "joined", min(3 * batch, 256), seconds, kind)
            for _ in range(rounds):
                rates["bare"].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
                rates["whole"].append(whole(server).rate * batch)
                rates["joined"].append(joined(server).rate)
    return rates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--only", choices=("engines", "served"), help="just this table")
    arguments = parser.parse_args()
    need("wrk")
    parts = [f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds:g} s.\n"]
    with tempfile.TemporaryDirectory() as directory:
        for name, table in (("engines", engines), ("served", served)):
            if arguments.only in (None, name):
                parts.append(table(arguments.seconds, arguments.rounds, Path(directory)))
    print("\n".join(parts))


if __name__ == "__main__":
    main()
