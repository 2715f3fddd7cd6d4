"""GGUF files: converted once for their content, by OpenVINO GenAI itself."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from gguf_files import gguf_model
from nerite.backends.interface import ModelContext
from nerite.backends.python import environments
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.llm import installation
from nerite.llm.checkpoint import CheckpointContent, checkpoint_content
from nerite.llm.selection import OPENVINO, VLLM, choose


@pytest.fixture(autouse=True)
def _going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "stopped", threading.Event())


def context(tmp_path: Path, name: str = "m", **parameters: str) -> ModelContext:
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return ModelContext(name, 1, tmp_path / name, config, {environments.SETTING: str(tmp_path / "kept")})


def test_converted_once_for_its_content(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m" / "1" / "model.gguf")
    converted = installation.converted(context(tmp_path))
    names = {path.name for path in converted.iterdir()}
    assert {"openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"} <= names
    assert "model.gguf" not in names
    (tmp_path / "twin" / "1").mkdir(parents=True)
    shutil.copy(file, tmp_path / "twin" / "1" / "model.gguf")
    assert installation.converted(context(tmp_path, "twin")) == converted


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    gguf_model(tmp_path / "m" / "1" / "model.gguf", architecture="gemma")
    with pytest.raises(InvalidArgument, match=r"cannot be made:\n(.*\n)*.*architecture 'gemma'"):
        installation.converted(context(tmp_path))
    with pytest.raises(InvalidArgument, match="has its weights in a format of its own: remove the parameter"):
        installation.converted(context(tmp_path, WEIGHT_FORMAT="int4"))


def test_which_engine(tmp_path: Path) -> None:
    chosen = choose(CheckpointContent.GGUF, "", {OPENVINO, VLLM}, gpu=True)
    assert (chosen.engine, chosen.why) == (OPENVINO, "it reads GGUF files")
    with pytest.raises(Unavailable, match="but the model has a GGUF file"):
        choose(CheckpointContent.GGUF, VLLM, {VLLM}, gpu=True)
    (tmp_path / "a.gguf").touch()
    assert checkpoint_content(tmp_path) is CheckpointContent.GGUF
    (tmp_path / "b.gguf").touch()
    assert checkpoint_content(tmp_path) is CheckpointContent.NOTHING, "which of them?"
