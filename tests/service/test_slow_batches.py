"""A worker that is at one batch for very long says where it is, whatever it is at."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from nerite.workers.ipc.messages import STACKS_SIGNAL, THREADS_SIGNAL
from serving import HELD, Serving, eventually, let_go, python_model, serving

COUNTS = """
def execute(self, requests):
    # C, which lets no thread of Python run.
    sum(range(int(requests[0].inputs()[0].as_numpy().flat[0])))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""

# Its threads compute while the main thread waits for one of them.
THREADS = """
def spin(self, depth):
    while not self.over:
        self.descend(depth)

def descend(self, depth):
    return depth and self.descend(depth - 1)

def execute(self, requests):
    import threading
    self.over = False
    threads = [threading.Thread(target=self.spin, args=(depth,)) for depth in (0, 50, 100, 150)]
    for each in threads:
        each.start()
    threads[0].join(float(requests[0].inputs()[0].as_numpy().flat[0]))
    self.over = True
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, source in (("held", HELD), ("counts", COUNTS), ("threads", THREADS)):
        python_model(tmp_path / "models", name, source)
    return tmp_path / "models"


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Serving]:
    with serving(models, tmp_path / "log", "--stall-seconds=0.01") as server:
        yield server


def told_of(name: str) -> str:
    return f"instance '{name}_0_0' has executed a batch for more than "


def tells_where(server: Serving, models: Path, name: str) -> bool:
    place = str(models / name / "1" / "model.py")
    return any(place in line and line.rstrip().endswith('in execute"') for line in server.text.splitlines())


def test_a_model_that_waits_for_ever(server: Serving, models: Path) -> None:
    caller = Thread(target=server.infer, args=("held", [-1.0]))
    caller.start()
    try:
        eventually(lambda: tells_where(server, models, "held"))
    finally:
        let_go(models / "held")
    caller.join()
    assert server.text.count(told_of("held")) == 1
    server.infer("held", [1.0])  # the worker has gone on
    assert "died" not in server.text


def test_a_model_that_holds_the_interpreter(server: Serving, models: Path) -> None:
    number = 1e7
    while not tells_where(server, models, "counts"):
        server.infer("counts", [number], datatype="FP32")
        number *= 4  # more than twice as long, or it is no news
    assert told_of("counts") in server.text
    assert "died" not in server.text


def test_threads_that_compute(server: Serving) -> None:
    """They go on while the stacks are written, however often."""
    worker = server.workers()["threads_0_0"]
    caller = Thread(target=server.infer, args=("threads", [10.0]))
    caller.start()
    for _ in range(200):
        os.kill(worker, STACKS_SIGNAL)
        os.kill(worker, THREADS_SIGNAL)
        time.sleep(0.02)
    caller.join()
    assert server.text.count("in spin") >= 4
    assert re.search(r'line \d+ in execute"', server.text), "the main thread"
    assert server.workers()["threads_0_0"] == worker
    assert "died" not in server.text
