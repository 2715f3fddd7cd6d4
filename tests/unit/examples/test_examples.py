"""The example models: how they are built, and that they answer as the clients say. Needs no server."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest

from nerite.backends.interface import ModelContext
from nerite.backends.onnxruntime import OnnxRuntimeBackend
from nerite.config.json_form import to_json
from nerite.config.loading import load_model_directory
from nerite.testing import load_model

EXAMPLES = Path(__file__).parents[3] / "examples"
LABELS = (EXAMPLES / "sources" / "digits" / "labels.txt").read_text().split()


def imported(directory: Path, name: str) -> ModuleType:
    """Import a program beside which its own modules lie."""
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(directory))


build = imported(EXAMPLES, "build")
picture = imported(EXAMPLES / "clients", "picture")


@pytest.fixture(scope="module")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    models = tmp_path_factory.mktemp("build") / "models"
    return models, built(models)


@pytest.fixture
def models(first_build: tuple[Path, list[str]]) -> Path:
    return first_build[0]


def built(models: Path) -> list[str]:
    # Training is imported by the build when it is needed.
    sys.path.insert(0, str(EXAMPLES))
    try:
        return build.build(models)
    finally:
        sys.path.remove(str(EXAMPLES))


def contents(models: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in models.rglob("*") if path.is_file()]
    return {str(path.relative_to(models)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_the_first_build_makes_every_model(first_build: tuple[Path, list[str]]) -> None:
    models, done = first_build
    assert {path.name for path in models.iterdir()} == {"babble", "digits", "digits_preprocess", "scaler"}
    assert done[:-1] == [
        "copied babble/1/corpus.txt",
        "copied babble/1/model.py",
        "copied babble/config.pbtxt",
        "copied digits/config.pbtxt",
        "copied digits/labels.txt",
        "copied digits_preprocess/1/model.py",
        "copied digits_preprocess/config.pbtxt",
        "copied scaler/1/model.py",
        "copied scaler/2/model.py",
        "copied scaler/config.pbtxt",
    ]
    assert done[-1].startswith("trained digits/1/model.onnx: 9")
    assert not list(models.rglob("*.unfinished"))


def test_the_second_build_does_nothing(models: Path) -> None:
    before = contents(models)
    assert built(models) == []
    assert contents(models) == before


def test_only_what_changed_is_built_again(models: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(models, copy)
    (copy / "scaler" / "config.pbtxt").write_text("changed")
    (copy / "digits" / "labels.txt").unlink()
    assert built(copy) == ["copied digits/labels.txt", "copied scaler/config.pbtxt"]
    os.utime(copy / "digits" / "1" / "model.onnx", ns=(1, 1))
    [line] = built(copy)
    assert line.startswith("trained digits/1/model.onnx")


def test_a_bad_classifier_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "GOOD_ENOUGH", 1.1)
    with pytest.raises(RuntimeError, match=r"of the digits are right, there should be 110%"):
        built(tmp_path)
    assert [path.name for path in (tmp_path / "digits" / "1").iterdir()] == []


@pytest.mark.parametrize(
    ("done", "told"),
    [
        ([], "examples/models: up to date\n"),
        (["copied a", "trained b"], "examples/models: copied a\nexamples/models: trained b\n"),
    ],
)
def test_the_program_says_what_it_did(
    done: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "build", lambda: done)
    build.main()
    assert capsys.readouterr().out == told


def test_every_configuration_is_right(models: Path) -> None:
    for directory in sorted(models.iterdir()):
        loaded = load_model_directory(directory)
        assert loaded.mistakes == ()
        assert loaded.remarks == ()
        assert loaded.configs.keys() == ({1, 2} if directory.name == "scaler" else {1})


def test_the_classifier_agrees_with_its_configuration_and_with_most_people(models: Path) -> None:
    from sklearn.datasets import load_digits

    config = to_json(load_model_directory(models / "digits").configs[1])
    OnnxRuntimeBackend().open(ModelContext("digits", 1, models / "digits", config))
    images, digits = load_digits(return_X_y=True)
    session = onnxruntime.InferenceSession(models / "digits" / "1" / "model.onnx")
    [probabilities] = session.run(None, {"pixels": images.astype(np.float32)})
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert (probabilities.argmax(1) == digits).mean() > 0.97


@pytest.mark.parametrize("path", sorted((EXAMPLES / "clients" / "pictures").iterdir()), ids=lambda path: path.stem)
def test_each_picture_is_read_as_what_it_shows(models: Path, path: Path) -> None:
    image = np.array([picture.read(path)], np.uint8)
    with load_model(models / "digits_preprocess") as model:
        pixels = model.infer({"image": image})["pixels"]
    assert pixels.shape == (1, 64)
    session = onnxruntime.InferenceSession(models / "digits" / "1" / "model.onnx")
    [probabilities] = session.run(None, {"pixels": pixels})
    assert LABELS[probabilities[0].argmax()] == path.stem


@pytest.mark.parametrize("shape", [(8, 8), (3, 5), (1, 1), (32, 32), (100, 33)])
def test_preprocessing_averages(models: Path, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
    with load_model(models / "digits_preprocess") as model:
        pixels = model.infer({"image": image})["pixels"].reshape(2, 8, 8)
    # The mean stays, whatever the size.
    np.testing.assert_allclose(pixels.mean((1, 2)), image.mean((1, 2)) * 16 / 255, rtol=1e-4)
    if shape == (32, 32):
        blocks = image.reshape(2, 8, 4, 8, 4).mean((2, 4)) * 16 / 255
        np.testing.assert_allclose(pixels, blocks, rtol=1e-4)


def test_the_two_versions_scale_in_two_ways(models: Path) -> None:
    numbers = np.array([1, 2, 3, 4, 10], np.float32)
    answers = []
    for version in (1, 2):
        with load_model(models / "scaler", version=version) as model:
            answers.append(model.infer({"numbers": numbers})["scaled"])
            assert model.infer({"numbers": np.full(3, 7, np.float32)})["scaled"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(answers[0], (numbers - 1) / 9, rtol=1e-6)
    np.testing.assert_allclose(answers[1], (numbers - numbers.mean()) / numbers.std(), rtol=1e-6)


def test_a_drawing_with_ragged_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("..#\n..\n")
    with pytest.raises(SystemExit, match="of one length"):
        picture.read(tmp_path / "bad.txt")
