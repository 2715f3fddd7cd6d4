"""What the ONNX backend costs over a bare ``session.run`` loop, in process.

Two small models, batches of 1, 8 and 32 rows; for each, calls a second of

- ``bare``: ``session.run`` on an array that is ready, results thrown away;
- ``own``:  the same, each thread with a session of its own and as many threads as ONNX Runtime likes;
- ``one``:  ``backend.execute`` of one request with all the rows;
- ``many``: ``backend.execute`` of as many requests as rows, joined into the batch and split again.

All but ``own`` use one session, in one thread and in two, as two instances would. They take turns, many times over;
the ratios are of medians, to the bare loop. On a machine where others work too the rates say little; the ratios of
processor time a call still do.

    python benchmarks/onnx_backend.py [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnxruntime import InferenceSession

from nerite.backends import registry
from nerite.backends.interface import ExecutionTimes, Instance, InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorSpec
from onnx_models import cnn, mlp

ROUNDS = 11
SLICE_SECONDS = 0.06
BATCHES = (1, 8, 32)
RATIOS = ("own", "one", "many")


class _Nobody:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take no answer: a backend returns them."""


def _request(rows: np.ndarray) -> InferenceRequest:
    header = RequestHeader("m", "", [TensorSpec("IN", dtypes.FP32, rows.shape)])
    header.batch_size = len(rows)
    return InferenceRequest(header, [memoryview(bytearray(rows.tobytes()))], _Nobody(), 0)


class Pace(NamedTuple):
    """How fast calls were, and what they cost."""

    rate: float
    """Calls a second."""
    cost: float
    """Seconds of processor time a call, with all threads that it keeps busy."""


def _pace(calls: list[Callable[[], object]]) -> Pace:
    """Make calls with one thread for each of ``calls``, for a while."""
    counts = [0] * len(calls)
    end = time.perf_counter() + SLICE_SECONDS

    def work(index: int, call: Callable[[], object]) -> None:
        count = 0
        while count == 0 or time.perf_counter() < end:
            for _ in range(4):
                call()
            count += 4
        counts[index] = count

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    started, spent = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, spent = time.perf_counter() - started, time.process_time() - spent
    return Pace(sum(counts) / took, spent / sum(counts))


class Opened(NamedTuple):
    """A model with two instances, the session that they share, and two sessions as ONNX Runtime makes them."""

    session: Any
    own: list[Any]
    instances: list[Instance]


def opened(directory: Path, proto: onnx.ModelProto) -> Opened:
    """Save and open a model."""
    (directory / "1").mkdir()
    onnx.save(proto, directory / "1" / "model.onnx")
    backend = registry.backend("onnxruntime")
    context = ModelContext("m", 1, directory, {"max_batch_size": max(BATCHES)})
    completed = backend.complete(context)
    [session] = context.memo.values()
    model = backend.open(replace(context, config=completed))
    own = [InferenceSession(directory / "1" / "model.onnx", providers=["CPUExecutionProvider"]) for _ in range(2)]
    return Opened(session, own, [model.instance(InstanceContext(f"m_{index}")) for index in range(2)])


def contenders(model: Opened, rows: np.ndarray, threads: int) -> dict[str, list[Callable[[], object]]]:
    """Return what takes turns: for each name one call a thread."""
    one, many = [_request(rows)], [_request(rows[index : index + 1]) for index in range(len(rows))]
    for request in many:
        # A transport makes one header of equal ones.
        request.header = many[0].header
    instances = model.instances[:threads]
    return {
        "bare": [lambda: model.session.run(None, {"IN": rows})] * threads,
        "own": [lambda session=session: session.run(None, {"IN": rows}) for session in model.own[:threads]],
        "one": [lambda instance=instance: instance.execute(one, ExecutionTimes()) for instance in instances],
        "many": [lambda instance=instance: instance.execute(many, ExecutionTimes()) for instance in instances],
    }


def measure() -> list[dict[str, Any]]:
    """Return one row for each model, batch size and number of threads: the median of each contender's rates."""
    found = []
    for name, (proto, dims) in {"mlp": mlp(), "cnn": cnn()}.items():
        with tempfile.TemporaryDirectory() as directory:
            model = opened(Path(directory), proto)
            for batch, threads in itertools.product(BATCHES, (1, 2)):
                rows = np.random.default_rng(1).random((batch, *dims), dtype=np.float32)
                calls = contenders(model, rows, threads)
                paces: dict[str, list[Pace]] = {contender: [] for contender in calls}
                for _ in range(ROUNDS):
                    for contender in calls:
                        paces[contender].append(_pace(calls[contender]))
                        # The threads of "own" spin on for a while.
                        time.sleep(0.1)
                row: dict[str, Any] = {"model": name, "batch": batch, "threads": threads}
                for contender, values in paces.items():
                    row[f"{contender} rate"] = statistics.median(pace.rate for pace in values)
                    row[f"{contender} cost"] = statistics.median(pace.cost for pace in values)
                found.append(row)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="the ONNX backend beside a bare session.run loop")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    found = measure()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    columns = [f"{name} {what}" for what in ("rate", "cost") for name in RATIOS]
    print(f"{'model':6}{'batch':>6}{'threads':>8}{'bare/s':>9}{'bare us':>9}", *(f"{name:>10}" for name in columns))
    for row in found:
        ratios = [f"{row[column] / row[f'bare {column.split()[1]}']:10.2f}" for column in columns]
        bare = f"{row['bare rate']:9.0f}{row['bare cost'] * 1e6:9.1f}"
        print(f"{row['model']:6}{row['batch']:6}{row['threads']:8}{bare}", *ratios)


if __name__ == "__main__":
    main()
