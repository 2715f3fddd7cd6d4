"""What becomes of device memory: over loads and unloads, good and bad; when a worker is killed; when it runs out.

In a rehearsal it is the memory of the server's processes. Run as a program, this writes the models that need PyTorch:

    python -m gpu_parts.memory FOLDER KIND
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from footprint import resident
from numpy.typing import NDArray

from gpu_parts import answer_models
from gpu_parts.answer_models import configuration, exported, rows
from gpu_parts.cards import Card
from gpu_parts.part import Part
from serving import Serving, eventually, python_model

_GREEDY = """
import torch


class Greedy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.empty(1 << 50, dtype=torch.uint8, device="{device}")

    def forward(self, X):
        return {{"OUT": X}}
"""
_CRASHES = """
def initialize(self, args):
    os.kill(os.getpid(), signal.SIGKILL)

def execute(self, requests):
    return []
"""
_HOLDS = """
def initialize(self, args):
    import torch
    self.torch = torch
    self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
    self.held = torch.ones(1, device=self.device)

def execute(self, requests):
    answers = []
    for request in requests:
        mebibytes = int(request.inputs()[0].as_numpy().flat[0])
        if mebibytes:
            self.held = self.torch.ones(mebibytes << 20, dtype=self.torch.uint8, device=self.device)
        pid = np.array([[os.getpid()]], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)]))
    return answers
"""
_CONFIG = """backend: "{backend}"
max_batch_size: {batch}
input {{ name: "X" data_type: TYPE_FP32 dims: [ {given} ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
"""
_SHARED = 'parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }\n'
"""Has a module in Python run in the server's process, where memory that is left behind stays."""
_WRITTEN = ("exported_wide", "scripted_wide", "python")
_MIB = 2**20
_BEYOND = 1 << 30
"""MiB that no machine has."""
_EDGE = 1 << 16
"""Of a cube of numbers that no machine has memory for."""
_TURNS = ("exported_wide", "scripted_wide", "exported_wide", "truncated", "scripted_wide", "greedy")
_RARE = {100: "python", 25: "crashes"}
"""Loads that take longer: one of so many."""
_BAD = ("truncated", "greedy", "crashes")
_NOISE = 0.5
"""MiB."""
_PATIENCE = 20.0
_PAUSE = 0.01
_REST = 8.0
"""Seconds before the limit at which no further model is loaded."""


class Amounts(NamedTuple):
    """How much is done."""

    warm: int
    """Loads before memory is first looked at: PyTorch keeps memory for each of 32 streams, and a load has the next."""
    loads: int
    held: int
    """MiB of the worker that is killed."""


class Asking(NamedTuple):
    """A model, and requests that take more than there is, and little: shapes and data."""

    title: str
    model: str
    much: tuple[list[int], list[float]]
    little: tuple[list[int], list[float]]


_AMOUNTS = Amounts(48, 200, 10 << 10)
_REHEARSED = Amounts(6, 25, 128)
Used = Callable[[], float]
"""Returns the memory in use, in MiB."""


def run(part: Part) -> None:
    """Have models come and go, be killed, and run out of memory."""
    models, amounts = repository(part), _AMOUNTS if part.gpu else _REHEARSED
    started = [f"--load-model={name}" for name in ("steady", "holder", "cubed")]
    with part.server(models, "--model-control-mode=explicit", *started) as server, neighbour(part, server):
        used = memory_of(part, server)
        with part.attempt("a worker that is killed"):
            killed(part, server, amounts, used)
        for asking in (
            Asking("a Python model", "holder", ([1, 1], [float(_BEYOND)]), ([1, 1], [0.0])),
            Asking("a program of torch.export", "cubed", ([_EDGE], [1.0] * _EDGE), ([2], [1.0] * 2)),
        ):
            with part.attempt(f"{asking.title} runs out of memory"):
                exhausted(part, server, asking)
        with part.attempt("loads and unloads"):
            loads(part, server, amounts, used)


def repository(part: Part) -> Path:
    """Write the models."""
    models = part.folder / "models"
    for name in ("cubed", "greedy"):
        (models / name / "1").mkdir(parents=True)
    writing = part.program(sys.executable, "-m", "gpu_parts.memory", part.folder, part.result.kind)
    (models / "greedy" / "1" / "model.py").write_text(_GREEDY.format(device="cuda:0" if part.gpu else "cpu"))
    in_python = _CONFIG.format(backend="python", batch=8, given=1)
    python_model(models, "crashes", _CRASHES, in_python)
    python_model(models, "holder", _HOLDS, in_python + part.instances())
    configs = {
        "cubed": _CONFIG.format(backend="pytorch", batch=0, given=-1),
        "greedy": _CONFIG.format(backend="pytorch", batch=8, given=1) + _SHARED,
    }
    for name, config in configs.items():
        (models / name / "config.pbtxt").write_text(config + part.instances())
    writing.wait()
    for name in _WRITTEN:
        (models / name / "config.pbtxt").write_text(configuration(name, part.instances()))
    for name in ("steady", "truncated"):
        shutil.copytree(models / "exported_wide", models / name)
    file = models / "truncated" / "1" / "model.pt2"
    os.truncate(file, file.stat().st_size // 2)
    return models


def memory_of(part: Part, server: Serving) -> Used:
    """Return what tells the memory in use: of the card, or of the server's processes."""
    if not part.gpu:
        return lambda: resident(server.process.pid)
    card = Card.first()
    return lambda: card.memory().used / _MIB


def wrong(server: Serving, model: str, expected: NDArray[np.float32]) -> str:
    """Ask one of the models whose answers are known; return what is wrong with it, if anything is."""
    try:
        found = np.array(server.infer(model, rows("wide")[0].tolist(), "X"), np.float32)
    except (OSError, RuntimeError) as error:
        return f"{model}: {error}"
    return "" if np.allclose(found, expected, atol=1e-2) else f"{model}: {found[:4]}"


def answers(part: Part) -> NDArray[np.float32]:
    """Return what all of these models answer for the first row."""
    known: NDArray[np.float32] = np.load(part.folder / "answers" / "python.npy")[0]
    return known


@contextmanager
def neighbour(part: Part, server: Serving) -> Iterator[None]:
    """Ask a model that stays, all the time; report how often that went wrong."""
    stop, expected = threading.Event(), answers(part)
    found: list[str] = []

    def ask() -> None:
        while not stop.wait(_PAUSE):
            found.append(wrong(server, "steady", expected))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    part.figure("answers of a neighbour meanwhile", len(found))
    mistakes = [each for each in found if each]
    print(*mistakes[:3], sep="\n", end="")
    part.figure("wrong or failed ones", len(mistakes), "", "== 0")


def loads(part: Part, server: Serving, amounts: Amounts, used: Used) -> None:
    """Load, ask and unload models in turn, and compare the memory in use."""
    expected, mistakes = answers(part), []
    first = before = settled(used)
    began, done = time.monotonic(), 0
    for number in range(-amounts.warm, amounts.loads):
        if part.left < _REST:
            break
        if not number:
            before, began = settled(used), time.monotonic()
        done = number + 1
        rare = next((name for every, name in _RARE.items() if number % every == every - 1), None)
        name = rare or _TURNS[number % len(_TURNS)]
        status, _, body = server.ask("POST", f"/v2/repository/models/{name}/load", {})
        if name in _BAD:
            mistakes += [f"{name} was loaded"] if status == 200 else []
            continue
        mistakes.append(wrong(server, name, expected) if status == 200 else f"{name}: {body.decode()}")
        server.ask("POST", f"/v2/repository/models/{name}/unload", {})
        unloaded(server, name)
    after, took = settled(used), time.monotonic() - began
    mistakes = [each for each in mistakes if each]
    print(*mistakes[:3], sep="\n", end="")
    part.figure("loads that went otherwise than they should", len(mistakes), "", "== 0")
    part.figure(f"growth over the first {amounts.warm} loads", before - first, "MiB")
    part.figure("further loads and unloads, good and bad", done, "", f">= {amounts.loads}")
    part.gpu_figure("growth over these", after - before, "MiB", "<= 1")
    part.figure("loads and unloads", done / took, "1/s")


def unloaded(server: Serving, name: str) -> None:
    """Wait until a model is gone."""
    eventually(lambda: server.state(name) != "UNLOADING")


def settled(used: Used) -> float:
    """Return the memory in use when it has not changed for half a second, or after two."""
    until, last, since = time.monotonic() + 2, used(), time.monotonic()
    while time.monotonic() < min(until, since + 0.5):
        time.sleep(0.05)
        if abs((now := used()) - last) > _NOISE:
            last, since = now, time.monotonic()
    return used()


def killed(part: Part, server: Serving, amounts: Amounts, used: Used) -> None:
    """Kill a worker that holds memory, and wait for that, and for its successor."""
    pid = int(server.infer("holder", [0.0], "X")[0])
    before = settled(used)
    server.infer("holder", [float(amounts.held)], "X")
    during, began = settled(used), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while used() > before + 0.1 * (during - before) and time.monotonic() < began + _PATIENCE:
        time.sleep(_PAUSE)
    part.figure("memory that a worker held", during - before, "MiB", f">= {0.9 * amounts.held:g}")
    part.figure("time until it is back after SIGKILL", time.monotonic() - began, "s", "<= 10")
    eventually(lambda: replaced(server, pid))
    part.figure("time until its successor answers", time.monotonic() - began, "s")
    part.gpu_figure("memory that is not back", settled(used) - before, "MiB", "<= 16")


def replaced(server: Serving, pid: int) -> bool:
    """Return whether another process than the one that was killed answers."""
    try:
        return int(server.infer("holder", [0.0], "X")[0]) != pid
    except RuntimeError:
        return False


def exhausted(part: Part, server: Serving, asking: Asking) -> None:
    """Ask for more than there is, and then for little."""

    def ask(shape: list[int], data: list[float]) -> tuple[int, str]:
        tensor = {"name": "X", "shape": shape, "datatype": "FP32", "data": data}
        status, _, body = server.ask("POST", f"/v2/models/{asking.model}/infer", {"inputs": [tensor]})
        return status, body.decode()

    status, error = ask(*asking.much)
    print(f"  {status}: {error[:300]}")
    part.figure(f"{asking.title} runs out of memory: an error says so", status >= 400 and "memory" in error, "", "== 1")
    part.figure(f"{asking.title}: the next request is answered", ask(*asking.little)[0] == 200, "", "== 1")


def main(folder: Path, kind: str) -> None:
    """Write the models whose answers are known, and one that fills a cube with the edge of what it is given."""
    import torch

    class Cubed(torch.nn.Module):
        def forward(self, X: torch.Tensor) -> dict[str, torch.Tensor]:
            edge = X.shape[0]
            cube = X.reshape(edge, 1, 1).expand(edge, edge, edge).contiguous()
            return {"OUT": cube.sum().reshape(1)}

    answer_models.main(folder, kind, [*_WRITTEN])
    torch.export.save(exported(Cubed(), (torch.ones(3),), _EDGE), folder / "models" / "cubed" / "1" / "model.pt2")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
