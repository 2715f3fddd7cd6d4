"""A server whose event loop stands still says where everybody is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from serving import HELD, IN_PROCESS, Serving, eventually, let_go, pbtxt, python_model, serving

COUNTS = """
def execute(self, requests):
    # C, which lets nobody else run.
    sum(range(int(requests[0].inputs()[0].as_numpy().flat[0])))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
STANDS, GOES_ON = "the event loop has stood still for ", "the event loop goes on, after "


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, source in (("held", HELD), ("counts", COUNTS)):
        python_model(tmp_path / "models", name, source, pbtxt(parameters=IN_PROCESS))
    return tmp_path / "models"


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Serving]:
    with serving(models, tmp_path / "log", "--stall-seconds=1") as server:
        yield server


def line_of(server: Serving, text: str) -> str:
    (line,) = [line for line in server.text.splitlines() if text in line]
    return line


def test_a_model_that_holds_the_loop(server: Serving, models: Path) -> None:
    caller = Thread(target=server.infer, args=("held", [-1.0]))
    caller.start()
    eventually(lambda: STANDS in server.text)
    told = line_of(server, STANDS)
    assert told.startswith("E")
    first = told.partition("thread '")[2].partition("thread '")[0]
    assert first.startswith("MainThread':")
    assert str(models / "held" / "1" / "model.py") in first and "in execute" in first
    assert "thread 'watchdog'" not in told
    assert GOES_ON not in server.text
    let_go(models / "held")
    caller.join()
    eventually(lambda: GOES_ON in server.text)
    assert line_of(server, GOES_ON).startswith("W")


def test_a_model_that_holds_the_interpreter(server: Serving, models: Path) -> None:
    number = 1e7
    while "the server stood still for " not in server.text:
        server.infer("counts", [number], datatype="FP32")
        number *= 2
    told = line_of(server, "the server stood still for ")
    assert "something held the interpreter" in told
    assert str(models / "counts" / "1" / "model.py") in told and "in execute" in told
