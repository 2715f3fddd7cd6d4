"""The engine of a model: by its backend, its parameter or its files; what is made for it, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nerite.backends import registry
from nerite.backends.interface import ModelContext
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm import installation, selection
from nerite.llm.installation import Installation
from nerite.observability import gpus

PYTHON = Path("/environments/vllm/bin/python")
Model = Callable[..., ModelContext]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Write a version with these files."""

    def made(*files: str, backend: str = "llm", kind: str = "", **parameters: str) -> ModelContext:
        (tmp_path / "1").mkdir()
        for file in files:
            (tmp_path / "1" / file).write_text("{}")
        config: dict[str, Any] = {"backend": backend}
        config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
        if kind:
            config["instance_group"] = [{"kind": kind}]
        return ModelContext("m", 1, tmp_path, config)

    return made


CHECKPOINT = ("config.json", "model.safetensors")


class Machine:
    """What is installed, and what was made."""

    def __init__(self) -> None:
        self.here = {selection.OPENVINO}
        self.apart: set[str] = set()
        self.made: list[str] = []


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    has = Machine()

    def made(wanted: Installation, place: Path) -> Path:
        has.made.append(wanted.name)
        return PYTHON

    def converted(context: ModelContext) -> Path:
        has.made.append("conversion")
        return context.version_directory

    monkeypatch.setattr(selection, "here", lambda engine: engine in has.here)
    monkeypatch.setattr(installation, "found", lambda wanted, place: PYTHON if wanted.name in has.apart else None)
    monkeypatch.setattr(installation, "made", made)
    monkeypatch.setattr(installation, "converted", converted)
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path / "no driver")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return has


def test_a_checkpoint_on_processors(model: Model, machine: Machine) -> None:
    assert registry.prepared(model(*CHECKPOINT)) is None
    assert machine.made == ["conversion"]


def test_a_checkpoint_on_a_gpu(model: Model, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path)
    machine.apart = {"vllm"}
    assert registry.prepared(model(*CHECKPOINT)) == PYTHON
    assert machine.made == []


@pytest.mark.parametrize("how", [{"kind": "KIND_CPU"}, {"visible": ""}])
def test_a_gpu_that_is_not_for_the_model(
    how: dict[str, str], model: Model, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path)
    machine.apart = {"vllm"}
    if "visible" in how:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", how.pop("visible"))
    assert registry.prepared(model(*CHECKPOINT, **how)) is None


def test_vllm_is_made_where_it_is_named(model: Model, machine: Machine) -> None:
    assert registry.prepared(model(*CHECKPOINT, ENGINE="vllm")) == PYTHON
    assert machine.made == ["vllm"]


def test_a_repository_of_tritons_vllm_backend(model: Model, machine: Machine) -> None:
    context = model("model.json", backend="vllm")
    assert registry.prepared(context) == PYTHON
    # `nerite check` completes it without vLLM.
    completed = registry.backend_of(context).complete(context)
    assert completed["model_transaction_policy"] == {"decoupled": True}
    with pytest.raises(Unsupported, match=r"vllm is not installed\. Install it with: nerite engines install vllm"):
        registry.backend_of(context).open(context)


def test_an_environment_of_the_model_that_lacks_the_engine(model: Model) -> None:
    context = model("model.json", backend="vllm", EXECUTION_ENV_PATH="/env")
    with pytest.raises(Unsupported, match=r"the environment of model 'm' \(EXECUTION_ENV_PATH\) lacks .* 'vllm'"):
        selection.engine_of(context, "vllm")


def test_what_is_refused(model: Model, machine: Machine) -> None:
    context = model(*CHECKPOINT, backend="vllm", ENGINE="openvino_genai")
    with pytest.raises(InvalidArgument, match="has backend 'vllm' and the parameter ENGINE 'openvino_genai'"):
        registry.prepared(context)
    with pytest.raises(Unavailable, match="tensorrt_llm needs an NVIDIA GPU, but this machine has no NVIDIA driver"):
        selection.prepared(model_without_engine(context), "tensorrt_llm")
    machine.here.clear()
    context.config["parameters"]["ENGINE"] = {"string_value": "openvino_genai"}
    with pytest.raises(Unsupported, match=r"openvino_genai is not installed\. Install it with: pip install 'nerite"):
        selection.prepared(context, "llm")
    context.config["parameters"]["ENGINE"] = {"string_value": "vlm"}
    with pytest.raises(InvalidArgument, match=r"model 'm': 'vlm' is not an engine\. Did you mean vllm"):
        selection.prepared(context, "llm")


def model_without_engine(context: ModelContext) -> ModelContext:
    return replace(context, config={**context.config, "parameters": {}})


def test_a_directory_without_a_model(model: Model) -> None:
    with pytest.raises(Unavailable, match=r"holds no language model\. Expected a Hugging Face checkpoint"):
        registry.prepared(model("README.md"))
