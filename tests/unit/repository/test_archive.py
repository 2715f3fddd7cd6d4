"""Which folder of an unpacked archive is the model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument
from nerite.transports import clouds

ENSEMBLE = 'platform: "ensemble"'


def folder(root: Path, **models: str) -> str:
    for name, config in models.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return str(root)


def refusal(url: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        clouds.find_archive(url)
    return caught.value.message


def test_one_model(tmp_path: Path) -> None:
    assert clouds.find_archive(folder(tmp_path, model="")) == (tmp_path, "model")


def test_a_model_itself(tmp_path: Path) -> None:
    folder(tmp_path, model="")
    assert clouds.find_archive(f"{tmp_path}/model") == (tmp_path, "model")
    assert clouds.find_archive(f"{tmp_path}/model/1/..//") == (tmp_path, "model")


def test_a_path_that_is_relative(tmp_path: Path) -> None:
    folder(tmp_path, model="")
    assert clouds.find_archive(os.path.relpath(tmp_path)) == (tmp_path, "model")


@pytest.mark.parametrize("config", [ENSEMBLE, 'name: "b"\nplatform : "ensemble"\n', 'platform:"ensemble"'])
def test_an_ensemble_and_its_parts(tmp_path: Path, config: str) -> None:
    assert clouds.find_archive(folder(tmp_path, a="", b=config, c='platform: "onnxruntime_onnx"')) == (tmp_path, "b")


def test_what_is_hidden_or_no_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "README").write_text("")
    assert clouds.find_archive(str(tmp_path)) == (tmp_path, "")
    assert clouds.find_archive(folder(tmp_path, model="")) == (tmp_path, "model")


@pytest.mark.parametrize("config", ["", ENSEMBLE])
def test_nothing_says_which_one(tmp_path: Path, config: str) -> None:
    said = refusal(folder(tmp_path, a=config, b=config))
    assert said.startswith(f"'{tmp_path}' has 2 models: a, b.")


@pytest.mark.parametrize("url", ["", "/no/such/folder"])
def test_nothing_there(url: str) -> None:
    assert refusal(url) == f"failed to register '{url}', repository not found"


@pytest.mark.parametrize("url", ["/proc/self", "/dev", "/tmp/../sys/kernel"])
def test_no_folder_at_all(url: str) -> None:
    assert refusal(url).startswith(f"Invalid URL: {url}. ")
