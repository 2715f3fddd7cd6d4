"""The core alone: what ``pip install nerite`` brings is small, and serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from nerite.backends import registry
from nerite.config.defaults import FRAMEWORKS
from serving import IDENTITY, python_model

ROOT = Path(__file__).resolve().parents[2]
MAX_MEGABYTES = 115


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the core and nothing else."""
    environment = tmp_path_factory.mktemp("core") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, ROOT], check=True, timeout=300)
    yield environment


@pytest.mark.timeout(400)
def test_size(core: Path) -> None:
    (site,) = (core / "lib").glob("python*/site-packages")
    size = sum(
        entry.stat().st_size
        for folder, _, files in os.walk(site)
        for name in files
        if not (entry := Path(folder, name)).is_symlink()
    )
    assert size / 1e6 < MAX_MEGABYTES


def test_serves_a_python_model(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    python_model(tmp_path / "models", "identity", IDENTITY)
    with serving.serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("identity", [1.0, 2.0]) == [1.0, 2.0]
        assert [server.ask("GET", path)[0] for path in ("/v2/docs", "/ui", "/ui/uPlot.esm.js")] == [200] * 3


TYPED = """
from typing import assert_type

import c_python_backend_utils
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self.family = pb_utils.MetricFamily("rows", "Rows", pb_utils.MetricFamily.HISTOGRAM)
        self.rows: pb_utils.Metric = self.family.Metric(labels={"model": args["model_name"]}, buckets=[1, 2.5])
        pb_utils.Logger.log(pb_utils.get_model_dir(), pb_utils.Logger.INFO)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses: list[c_python_backend_utils.InferenceResponse] = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            if tensor is None:
                error = pb_utils.TritonError("IN is missing", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            self.rows.observe(len(tensor.as_numpy()))
            output = pb_utils.Tensor("OUT", tensor.as_numpy().astype(np.float32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses

    async def ask(self, request: pb_utils.InferenceRequest) -> None:
        call = pb_utils.InferenceRequest(
            model_name="echo", requested_output_names=["OUT"], inputs=request.inputs(), trace=request.trace()
        )
        assert_type(call.exec(), pb_utils.InferenceResponse)
        assert_type(call.exec(decoupled=True), pb_utils.ResponseIterator)
        assert_type(await call.async_exec(), pb_utils.InferenceResponse)
        async for response in await call.async_exec(decoupled=True):
            assert_type(response, pb_utils.InferenceResponse)
        sender = request.get_response_sender()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        pb_utils.load_model(5)  # type: ignore[arg-type]  # mypy is strict about what is not needed, too
"""


def test_a_model_is_checked_by_mypy(core: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    (tmp_path / "model.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", core / "bin" / "python"]
    # What mypy knows of numpy is kept from one run to the next.
    command += ["--cache-dir", pytestconfig.cache.mkdir("mypy"), "model.py"]
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_a_missing_extra_says_what_to_install(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    extras = {name: entry.extra for name, entry in registry.ENTRIES.items() if entry.extra}
    for name in extras:
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        platform = next((f'platform: "{each.platform}"' for each in FRAMEWORKS if each.backend == name), "")
        (tmp_path / "models" / name / "config.pbtxt").write_text(f'backend: "{name}" {platform}')
    # What there is decides which engine is missing.
    (tmp_path / "models" / "llm" / "1" / "openvino_model.xml").touch()
    with serving.serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false") as server:
        entries = server.json("POST", "/v2/repository/index")
    assert {entry["name"]: entry["state"] for entry in entries} == dict.fromkeys(extras, "UNAVAILABLE")
    for entry in entries:
        assert f"pip install 'nerite[{extras[entry['name']]}]'" in entry["reason"]


def test_an_object_store_without_its_extra(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    with (
        pytest.raises(RuntimeError, match=r"Install it with: pip install 'nerite\[cloud\]'"),
        serving.serving("s3://bucket/models", tmp_path / "log", clean=False),
    ):
        pass
