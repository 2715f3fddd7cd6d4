"""A worker that is at one batch for very long says where it is, whatever it is at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from serving import HELD, Serving, eventually, let_go, python_model, serving

COUNTS = """
def execute(self, requests):
    # C, which lets no thread of Python run.
    sum(range(int(requests[0].inputs()[0].as_numpy().flat[0])))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, source in (("held", HELD), ("counts", COUNTS)):
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
