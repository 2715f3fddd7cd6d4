"""docs/custom-backends.md is followed: backends in the backend directory and in packages, on a running server."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nerite.backends import registry
from pages import ROOT, Page, run
from serving import Serving, eventually, serving

PAGE = Page("docs/custom-backends.md")
EXAMPLE = ROOT / "examples" / "backends" / "lookup"

ECHO = """
import os, signal, time

import numpy as np

from nerite.core.engine_report import EngineReport, RequestBegun, RequestProgress
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec


class EchoBackend:
    name = "echo"
    interface = 1

    def complete(self, context):
        tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
        tensors = {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
        return {**context.config, **tensors, "max_batch_size": 8}

    def open(self, context):
        self.model = context.name
        return self

    def instance(self, context):
        self.reporter = context.reporter
        return self

    def execute(self, requests, marks):
        for request in requests:
            value = np.frombuffer(request.data[0], np.float32)[0]
            if value == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if value == 7:
                begun = RequestBegun(time.monotonic_ns(), 5)
                progress = [RequestProgress(request, 2, begun)]
                self.reporter.report(EngineReport(running=3, total_blocks=8, free_blocks=6, progress=progress))
            if value == 8:
                self.reporter.give_up("nothing goes on here")
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (given,) = request.header.inputs
        header = ResponseHeader(self.model, "1", [TensorSpec("OUTPUT0", given.datatype, given.shape)])
        return InferenceResponse(header, request.data)

    def is_ready(self):
        return True

    def close(self):
        pass
"""
OLD = "class OldBackend:\n    name = 'old'\n    interface = 0\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip has installed: the example, and a package that offers two other backends."""
    folder = tmp_path_factory.mktemp("site")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", folder, EXAMPLE]
    subprocess.run(command, check=True, timeout=200)
    write(folder / "echo_backend.py", ECHO + OLD)
    write(folder / "echo-3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: echo\nVersion: 3.1\n")
    points = "[nerite.backends]\necho = echo_backend:EchoBackend\nold = echo_backend:OldBackend\n"
    write(folder / "echo-3.1.dist-info/entry_points.txt", points)
    return folder


@pytest.fixture(scope="module")
def server(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The command of the page, with models of all its backends and some that cannot be loaded."""
    folder = tmp_path_factory.mktemp("served")
    write(folder / "backends/linear/model.py", PAGE.block("class TritonPythonModel"))
    write(folder / "models/prices/config.pbtxt", PAGE.block("models/prices/config.pbtxt"))
    (folder / "models/prices/1").mkdir()
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(folder / "models/prices/1/weights.npz", coefficients=weights, intercept=np.float32([10, 20]))
    for backend in ("echo", "old", "nobody"):
        write(folder / f"models/{backend}/config.pbtxt", f'backend: "{backend}"')
        (folder / f"models/{backend}/1").mkdir()
    (folder / "models/elements").symlink_to(EXAMPLE / "models" / "elements")
    program, verb, models, flag = shlex.split(PAGE.block("nerite serve"))
    assert (program, verb, models) == ("nerite", "serve", "models")
    flag = flag.replace("=", f"={folder}/")
    path = {"PYTHONPATH": str(site)}
    with serving(folder / models, folder / "log", flag, "--exit-on-error=false", environment=path) as server:
        yield server


def test_every_block_is_known_here() -> None:
    parts = ("class TritonPythonModel", "models/prices", "nerite serve", "entry-points", "class TestLookup")
    known = (*parts, "class TinyBackend")  # The last one is in tests/unit/backends/test_array_backend.py.
    assert len(PAGE.blocks) == len(known)
    for part in known:
        PAGE.block(part)


def test_one_in_the_backend_directory(server: Serving) -> None:
    assert server.infer("prices", [1, 1, 1], "X") == [16, 29]
    config = server.json("GET", "/v2/models/prices/config")
    assert (config["backend"], config["runtime"], config["max_batch_size"]) == ("linear", "model.py", 64)
    assert "prices_0" in server.workers()


def test_the_example_package(server: Serving) -> None:
    asked = {"inputs": [{"name": "symbol", "datatype": "BYTES", "shape": [2, 1], "data": ["Li", "H"]}]}
    answer = server.json("POST", "/v2/models/elements/infer", asked)
    assert {output["name"]: output["data"] for output in answer["outputs"]} == {
        "name": ["Lithium", "Hydrogen"],
        "weight": pytest.approx([6.94, 1.008]),
    }
    unknown = {"inputs": [{"name": "symbol", "datatype": "BYTES", "shape": [1, 1], "data": ["Xx"]}]}
    status, _, body = server.ask("POST", "/v2/models/elements/infer", unknown)
    assert (status, body) == (404, b"{\"error\":\"the table of 'elements' has no row b'Xx'\"}")
    assert not any(name.startswith("elements") for name in server.workers())


def test_one_that_does_not_say_runs_in_a_worker(server: Serving) -> None:
    assert server.infer("echo", [1, 2]) == [1, 2]
    before = server.workers()["echo_0"]
    with pytest.raises(RuntimeError, match="SIGKILL"):
        server.infer("echo", [0])
    eventually(lambda: server.workers().get("echo_0", before) != before)
    eventually(lambda: server.ready("echo"))
    assert server.infer("echo", [3]) == [3]


def test_one_that_reports_what_an_engine_does(server: Serving) -> None:
    def told(name: str, more: str = "") -> float:
        return server.metrics().get(f'{name}{{model="echo",{more}version="1"}}', -1)

    assert told("vllm:generation_tokens_total") == -1
    assert server.infer("echo", [7]) == [7]
    assert (told("vllm:prompt_tokens_total"), told("vllm:generation_tokens_total")) == (5, 2)
    assert (told("vllm:num_requests_running"), told("vllm:kv_cache_usage_perc")) == (3, 0.25)
    with pytest.raises(RuntimeError, match="exited with status 70"):
        server.infer("echo", [8])
    assert "nothing goes on here; the worker ends" in server.text
    eventually(lambda: server.ready("echo"))
    assert (told("vllm:num_requests_running"), told("nerite_llm_requests")) == (0, 0)
    assert told("nerite_llm_wasted_tokens_total", 'reason="error",') == 2


def test_those_that_cannot_be_loaded_say_why(server: Serving) -> None:
    reasons = {entry["name"]: entry.get("reason", "") for entry in server.json("POST", "/v2/repository/index")}
    assert "backend 'old' of the package echo 3.1 is written for version 0 of the backend interface" in reasons["old"]
    there_are = ", ".join(sorted({*registry.ENTRIES, "echo", "linear", "lookup", "old"}))
    assert f"The available backends are: {there_are}." in reasons["nobody"]


def test_the_contract_tests_of_the_page(site: Path, tmp_path: Path) -> None:
    """And those of the example."""
    (tmp_path / "test_lookup.py").write_text(PAGE.block("class TestLookup"))
    alone = ["env", f"PYTHONPATH={site}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest"]
    alone += ["-q", "-o", "faulthandler_timeout=45"]
    flags = ["-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--import-mode=importlib"]
    # Two files of one name.
    said = run([*alone, *flags, str(tmp_path / "test_lookup.py"), str(EXAMPLE / "test_lookup.py")])
    assert " passed" in said, said


def test_the_entry_point_is_that_of_the_example() -> None:
    assert PAGE.block("entry-points").partition("\n")[2] in (EXAMPLE / "pyproject.toml").read_text()
