"""A server whose event loop stands still says where everybody is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest

from serving import HELD, IDENTITY, IN_PROCESS, Serving, eventually, let_go, pbtxt, python_model, serving

pytestmark = pytest.mark.timeout(150)

COUNTS = """
def execute(self, requests):
    # C, which lets nobody else run.
    sum(range(int(requests[0].inputs()[0].as_numpy().flat[0])))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
SECONDS = 90.0
"""The news of the minute before may keep back others of the kind."""
LONG_ENOUGH = 3.0
STANDS, GOES_ON = "the event loop has been blocked for ", "the event loop is running again after "


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, source in (("held", HELD), ("counts", COUNTS)):
        python_model(tmp_path / "models", name, source, pbtxt(parameters=IN_PROCESS))
    return tmp_path / "models"


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Serving]:
    with serving(models, tmp_path / "log", "--stall-seconds=1") as server:
        yield server


def line_about(server: Serving, text: str, model: Path) -> str:
    """The line that says so with a place in a model, if there is one: a busy machine may stand still by itself."""
    place = str(model / "1" / "model.py")
    return next((line for line in server.text.splitlines() if text in line and place in line), "")


def test_a_model_that_holds_the_loop(server: Serving, models: Path) -> None:
    caller = Thread(target=server.infer, args=("held", [-1.0]))
    caller.start()
    try:
        eventually(lambda: line_about(server, STANDS, models / "held") != "", SECONDS)
    finally:
        let_go(models / "held")
    caller.join()
    told = line_about(server, STANDS, models / "held")
    assert told.startswith("E")
    first = told.partition("thread '")[2].partition("thread '")[0]
    assert first.startswith("MainThread':")
    assert str(models / "held" / "1" / "model.py") in first and "in execute" in first
    assert "thread 'watchdog'" not in told

    def over() -> list[str]:
        return [line for line in server.text.partition(told)[2].splitlines() if GOES_ON in line]

    eventually(lambda: over() != [])
    assert over()[0].startswith("W")


def test_a_model_that_holds_the_interpreter(server: Serving, models: Path) -> None:
    number = 1e7
    deadline = time.monotonic() + SECONDS
    while not (told := line_about(server, "the server process was stalled for ", models / "counts")):
        assert time.monotonic() < deadline
        began = time.monotonic()
        server.infer("counts", [number], datatype="FP32")
        if time.monotonic() - began < LONG_ENOUGH:
            number *= 2
    assert "something held the GIL" in told
    assert "in execute" in told


def test_a_server_that_is_suspended(models: Path, tmp_path: Path) -> None:
    """It goes on, and not by reading stacks while they change."""
    python_model(models, "echo", IDENTITY)
    with serving(models, tmp_path / "log", "--stall-seconds=0.01") as server:
        over = Event()

        def ask() -> None:
            while not over.is_set():
                assert server.infer("echo", [1.0]) == [1.0]

        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(ask) for _ in range(4)]
            for _ in range(150):
                os.kill(server.process.pid, signal.SIGSTOP)
                time.sleep(0.04)  # much longer than the watchdog's limit
                os.kill(server.process.pid, signal.SIGCONT)
                time.sleep(0.02)
            over.set()
            for each in asked:
                each.result()
        assert server.process.poll() is None
        assert "the server process was stalled for " in server.text
