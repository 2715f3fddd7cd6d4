"""Models on demand whose engine sleeps while another needs the GPU, on stand-ins for vLLM and for the driver."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pages import ROOT, Page
from serving import Serving, eventually, serving

MEBIBYTE = 1 << 20
ASLEEP = ("UNAVAILABLE", "unloaded: asleep")
CONFIG = 'backend: "vllm"\ninstance_group { kind: KIND_GPU gpus: 0 }\n'


def repository(folder: Path, **models: dict[str, Any]) -> Path:
    """Write models that take 600 MiB of a GPU."""
    for name, given in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
        arguments = {"model": "m", "mortal": False, "gpu_bytes": 600 * MEBIBYTE, **given}
        (folder / name / "1" / "model.json").write_text(json.dumps(arguments))
    return folder


@contextmanager
def demanding(folder: Path, models: Path, *flags: str, tells: bool = True, seconds: float = 0.0) -> Iterator[Serving]:
    """``tells``: whether the driver tells processes apart. ``seconds``: the time that it takes to tell of memory."""
    gpu = {"uuid": "GPU-0", "name": "GPU", "capability": (9, 0), "memory": [1000 * MEBIBYTE, 0], "seconds": seconds}
    (folder / "gpus.json").write_text(json.dumps([gpu | ({"tells processes": True} if tells else {})]))
    (folder / "use").mkdir()
    stand_ins = [str(ROOT / "tests" / "stand_ins" / library) for library in ("nvml", "vllm")]
    environment = {
        "PYTHONPATH": os.pathsep.join([*stand_ins, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "STAND_IN_GPUS": str(folder / "gpus.json"),
        "STAND_IN_GPU_USE": str(folder / "use"),
        "CUDA_VISIBLE_DEVICES": "0",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    flags = ("--model-control-mode=demand", "--repository-poll-secs=1", *flags)
    with serving(models, folder / "log", *flags, environment=environment) as server:
        yield server


def said_by(server: Serving, model: str) -> str:
    asked = {"model": model, "prompt": "once", "max_tokens": 4}
    status, _, body = server.ask("POST", "/v1/completions", asked)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["text"])


def states(server: Serving) -> dict[str, tuple[str, str]]:
    index = server.json("POST", "/v2/repository/index")
    return {each["name"]: (each.get("state", ""), each.get("reason", "")) for each in index}


def figure(server: Serving, name: str) -> float:
    return server.metrics().get(name, -1.0)


def test_a_model_sleeps_while_another_works_and_is_woken(tmp_path: Path) -> None:
    given = json.loads(Page("docs/demand.md").block('"enable_sleep_mode"'))
    models = repository(tmp_path / "models", a=given, b=given)
    with demanding(tmp_path, models) as server:
        assert said_by(server, "a") == "abcd"
        (first,) = server.workers().values()
        assert said_by(server, "b") == "abcd"  # until it is measured, it counts as much as its files
        eventually(lambda: states(server) == {"a": ASLEEP, "b": ("READY", "")})
        assert server.ready("a"), "a request would be answered"
        eventually(lambda: figure(server, 'nerite_model_resident_bytes{model="a",place="GPU 0"}') == 30 * MEBIBYTE)
        for _ in range(2):
            assert said_by(server, "a") == "abcd"
            assert states(server) == {"a": ("READY", ""), "b": ASLEEP}
            assert said_by(server, "b") == "abcd"
            assert states(server) == {"a": ASLEEP, "b": ("READY", "")}
        assert first in server.workers().values(), "the same process as ever"
        assert server.text.count("loading: a:1") == 1
        figures = server.metrics()
        assert figures["nerite_demand_wakes_total"] == 4
        assert figures["nerite_demand_sleeps_total"] == 5
        assert figures['nerite_demand_loads_total{outcome="loaded"}'] == 2
        assert figures['nerite_demand_evictions_total{reason="memory"}'] == 0
        used = figures['nerite_memory_used_bytes{place="GPU 0"}']
        assert used == 630 * MEBIBYTE <= figures['nerite_memory_budget_bytes{place="GPU 0"}']

        # A client unloads it in its sleep; the files of one that sleeps change; the process of one that sleeps ends.
        assert server.ask("POST", "/v2/repository/models/a/unload")[0] == 200
        eventually(lambda: states(server)["a"] == ("UNAVAILABLE", "unloaded: on demand"))
        assert said_by(server, "a") == "abcd"
        assert server.text.count("loading: a:1") == 2
        eventually(lambda: states(server)["b"] == ASLEEP)
        (models / "b" / "config.pbtxt").write_text(CONFIG + "# changed\n")
        eventually(lambda: states(server)["b"] == ("UNAVAILABLE", "unloaded: on demand"))
        assert said_by(server, "b") == "abcd"
        eventually(lambda: states(server)["a"] == ASLEEP)
        shutil.rmtree(models / "a")
        eventually(lambda: "a" not in states(server))
        eventually(lambda: len(server.workers()) == 1)


def test_what_cannot_sleep_or_does_not_wake_is_unloaded(tmp_path: Path) -> None:
    models = repository(
        tmp_path / "models",
        awake={},
        tired={"enable_sleep_mode": True, "wakes": False},
        b={"enable_sleep_mode": "true"},
    )
    with demanding(tmp_path, models, tells=False) as server:
        assert said_by(server, "awake") == "abcd"
        assert said_by(server, "tired") == "abcd"
        eventually(lambda: states(server)["awake"] == ("UNAVAILABLE", "unloaded: on demand"))
        assert said_by(server, "b") == "abcd"
        eventually(lambda: states(server)["tired"] == ASLEEP)
        assert said_by(server, "tired") == "abcd"
        assert "'tired' does not wake, and is loaded again: " in server.text
        assert "CUDA out of memory" in server.text
        eventually(lambda: states(server)["b"] == ASLEEP)
        (worker,) = [pid for name, pid in server.workers().items() if name.startswith("b_")]
        os.kill(worker, signal.SIGKILL)
        # A new process would be awake: it is ended before that matters, at the latest by the next request.
        assert said_by(server, "b") == "abcd"
        assert states(server)["b"] == ("READY", "")


def test_a_load_that_begins_while_another_model_is_measured(tmp_path: Path) -> None:
    """Each is measured by how much the use of the GPU grows during its own load."""
    models = repository(tmp_path / "models", a={"gpu_bytes": 300 * MEBIBYTE}, b={"gpu_bytes": 400 * MEBIBYTE})
    with demanding(tmp_path, models, tells=False, seconds=0.3) as server:
        assert said_by(server, "a") == said_by(server, "b") == "abcd"
        eventually(lambda: server.text.count("on demand in ") == 2)
        told = re.findall("loaded '(.)' on demand in .* and (.*) of GPU 0 memory;", server.text)
        assert told == [("a", "300 MiB"), ("b", "400 MiB")]


def test_without_memory_of_the_host_they_are_unloaded(tmp_path: Path) -> None:
    """Asleep, the first would take what its process takes, and its files: that is too much by the engine's 100 MiB."""
    sleepy = {"enable_sleep_mode": True, "host_bytes": 100 * MEBIBYTE}
    models = repository(tmp_path / "models", a=sleepy, b=sleepy)
    (models / "a" / "1" / "weights").write_bytes(bytes(300 * MEBIBYTE))
    with demanding(tmp_path, models, "--demand-host-memory=350MiB") as server:
        assert said_by(server, "a") == "abcd"
        assert said_by(server, "b") == "abcd"
        eventually(lambda: states(server)["a"] == ("UNAVAILABLE", "unloaded: on demand"))
        assert figure(server, "nerite_demand_sleeps_total") == 0
