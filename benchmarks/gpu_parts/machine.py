"""What the machine has, and what the server makes of it: doctor, clients, placement, limits of memory, metrics."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc
import tritonclient.http
from loads import h2load, write_bodies, wrk

from gpu_parts.cards import Card
from gpu_parts.part import Part, Skipped, contestant, need
from serving import IDENTITY, NERITE, Serving, python_model

_WHERE = """
def initialize(self, args):
    self.where = f"{args['model_instance_kind']} {args['model_instance_device_id']}"

def execute(self, requests):
    where = np.array([[self.where]], dtype=object)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("WHERE", where)]) for _ in requests]
"""
_CONFIG = """backend: "python" max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "WHERE" data_type: TYPE_STRING dims: [ 1 ] }
"""
_GIB = 2**30
_ROOM = 2 * _GIB
"""What may be used of a card more than now before loads are refused."""
_HELD = 4 * _GIB
_ASKED = 30
"""Requests after which each of a few instances has answered one."""
_QUERIED = ("memory.total", "memory.used", "memory.reserved", "power.draw", "power.limit", "utilization.gpu")
_LOOK = 0.25
"""Seconds from one reading to the next."""


def run(part: Part) -> None:
    """Report on the machine."""
    with part.attempt("nerite doctor"):
        doctor(part, f"--expect-gpus={1 if part.gpu else 0}")
        if part.gpu:
            doctor(part)
    with part.attempt("a server"):
        models = repository(part)
        flags = ["--model-control-mode=explicit", "--metrics-interval-ms=100", "--load-model=identity"]
        card = Card.first() if part.gpu else None
        if card is not None:
            flags.append(f"--model-load-gpu-limit=0:{(card.memory().used + _ROOM) / card.memory().total:.6f}")
        with part.server(models, *flags) as server:
            with part.attempt("clients"):
                clients(part, server)
            with part.attempt("placement"):
                placement(part, server)
            for what, show in (("--model-load-gpu-limit", limit), ("metrics beside nvidia-smi", metrics)):
                with part.attempt(what):
                    if card is None:
                        raise Skipped("not rehearsed here: it needs a card")
                    show(part, server, card)


def doctor(part: Part, *flags: str) -> None:
    """Have the machine diagnosed."""
    command = [str(NERITE), "doctor", "--json", *flags]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    problems = [finding for finding in json.loads(said) if finding["level"] == "problem"]
    for finding in problems:
        print(f"  {finding['text']}. {finding['remedy']}")
    part.figure(" ".join(["problems of nerite doctor", *flags]), len(problems), "", "== 0")


def repository(part: Part) -> Path:
    """Write the models."""
    models = part.folder / "models"
    python_model(models, "identity", IDENTITY)
    python_model(models, "anywhere", _WHERE, _CONFIG)
    python_model(models, "processor", _WHERE, _CONFIG + "instance_group { kind: KIND_CPU }")
    python_model(models, "groups", _WHERE, _CONFIG + part.instances(2) + "instance_group { kind: KIND_CPU }")
    python_model(models, "late", _WHERE, _CONFIG + part.instances())
    python_model(models, "missing", _WHERE, _CONFIG + "instance_group { kind: KIND_GPU gpus: [ 99 ] }")
    return models


def clients(part: Part, server: Serving) -> None:
    """Ask as others do: with NVIDIA's client over both protocols, and with the load generators."""
    given = np.arange(16, dtype=np.float32).reshape(1, 16)
    for library, url in ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc)):
        tensor = library.InferInput("INPUT0", list(given.shape), "FP32")
        tensor.set_data_from_numpy(given)
        with library.InferenceServerClient(url) as client:
            answer = client.infer("identity", [tensor]).as_numpy("OUTPUT0")
        part.figure(f"difference of an answer to {library.__name__}", float(np.abs(answer - given).max()), "", "== 0")
    write_bodies(part.folder)
    loads = {"wrk": wrk(part.folder, "small", 8, 1), "h2load": h2load(part.folder, "small", 4, 4, 1)}
    for program, load in loads.items():
        with part.attempt(program):
            need(program)
            part.figure(f"{program}, small requests", load(contestant(server)).rate, "requests/s")


def placement(part: Part, server: Serving) -> None:
    """Load models whose configurations say where, and ask where they are."""
    device = "GPU 0" if part.gpu else "CPU 0"
    expected = {"anywhere": {device}, "processor": {"CPU 0"}, "groups": {device, "CPU 0"}}
    for model, places in expected.items():
        if (said := loaded(server, model))[0] != 200:
            raise RuntimeError(f"{model} was not loaded: {said}")
        found = {server.infer(model, [1])[0] for _ in range(_ASKED)}
        part.figure(f"instances of '{model}' where they should not be", len(found ^ places), "", "== 0")
    status, error = loaded(server, "missing")
    refused = status == 400 and "specifies invalid or unsupported gpu id 99" in error
    part.figure("a card that is not there is refused", refused, "", "== 1")


def loaded(server: Serving, model: str) -> tuple[int, str]:
    """Load a model; return the status and the error."""
    status, _, body = server.ask("POST", f"/v2/repository/models/{model}/load", {})
    return status, body.decode()


def limit(part: Part, server: Serving, card: Card) -> None:
    """Load a model while other memory of the card is in use, and after that."""
    with card.holding(_HELD):
        status, error = loaded(server, "late")
    refused = status == 400 and "memory limit set for GPU 0 has exceeded" in error
    part.figure("a load on a card that is too full is refused", refused, "", "== 1")
    part.figure("it is done when the memory is free", loaded(server, "late")[0] == 200, "", "== 1")


class Reading(NamedTuple):
    """What nvidia-smi and the metrics page say at about the same time."""

    moment: float
    smi: dict[str, float]
    page: dict[str, float]


def metrics(part: Part, server: Serving, card: Card) -> None:
    """Compare the metrics with nvidia-smi while the card computes."""
    with computing(part):
        readings = [read(server, card) for _ in range(12)]
    pairs = {"memory.total": "memory_total_bytes", "power.draw": "power_usage", "power.limit": "power_limit"}
    for theirs, ours in pairs.items():
        smi = statistics.mean(each.smi[theirs] for each in readings)
        page = statistics.mean(each.page[f"nv_gpu_{ours}"] for each in readings)
        page /= 2**20 if theirs == "memory.total" else 1
        wanted = "<= 0.15" if theirs == "power.draw" else "<= 0.01"
        part.figure(f"nv_gpu_{ours} beside nvidia-smi, relative difference", abs(page / smi - 1), "", wanted)
    # NVML's older function, which Triton uses as well, counts what the driver reserves.
    used = [
        abs(each.page["nv_gpu_memory_used_bytes"] / 2**20 - each.smi["memory.used"] - each.smi["memory.reserved"])
        for each in readings
    ]
    part.figure("nv_gpu_memory_used_bytes beside nvidia-smi, used and reserved", max(used), "MiB", "<= 64")
    busier = [each.page["nv_gpu_utilization"] - each.smi["utilization.gpu"] / 100 for each in readings]
    part.figure("nv_gpu_utilization beside nvidia-smi, difference", abs(statistics.mean(busier)), "", "<= 0.2")
    first, last = readings[0], readings[-1]
    joules = last.page["nv_energy_consumption"] - first.page["nv_energy_consumption"]
    expected = statistics.mean(each.smi["power.draw"] for each in readings) * (last.moment - first.moment)
    part.figure("nv_energy_consumption beside nvidia-smi's watts", abs(joules / expected - 1), "", "<= 0.15")


def read(server: Serving, card: Card) -> Reading:
    """Read both, after a moment."""
    time.sleep(_LOOK)
    command = ["nvidia-smi", f"--id={card.uuid}", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(",")
    page = {name.partition("{")[0]: value for name, value in server.metrics().items() if card.uuid in name}
    return Reading(time.monotonic(), dict(zip(_QUERIED, map(float, said), strict=True)), page)


@contextmanager
def computing(part: Part) -> Iterator[None]:
    """Multiply matrices on the card, from half a second before the block until it ends."""
    import torch

    stop = threading.Event()
    matrix: Any = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        while not stop.is_set():
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        stop.set()
        thread.join()
