from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nerite.config.loading import poll_model_directory
from nerite.repository import catalogue
from nerite.repository.catalogue import LoadedVersion
from nerite.repository.version_maker import ContentHashes

CONFIG = 'backend: "python" max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: 1 }'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    for name, text in {"config.pbtxt": CONFIG, "labels.txt": "cat", "1/model.py": "one", "2/model.py": "two"}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def loaded(model: Path) -> LoadedVersion:
    return LoadedVersion(poll_model_directory(model), catalogue.model_fingerprint(model))


def hashed(model: Path, version: int = 1) -> str:
    return ContentHashes().of_version(loaded(model), version)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(text)


def test_what_a_hash_looks_like(model: Path) -> None:
    assert hashed(model).startswith("sha256:")
    assert len(hashed(model)) == len("sha256:") + 64


@pytest.mark.parametrize(
    "change",
    [
        write("1/model.py", "on3"),
        write("1/more.py", ""),
        write("labels.txt", "cow"),
        write("config.pbtxt", CONFIG.replace("4", "5")),
        lambda model: (model / "labels.txt").rename(model / "names.txt"),
        lambda model: (model / "labels.txt").rename(model / "1" / "labels.txt"),
    ],
)
def test_what_changes_it(model: Path, change: Callable[[Path], object]) -> None:
    before = hashed(model)
    change(model)
    assert hashed(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: os.utime(model / "1" / "model.py", ns=(1, 1)),
        write("2/model.py", "another version"),
        write("config.pbtxt", f"# the same\n{CONFIG} instance_group {{ count: 2 }} version_policy {{ all {{}} }}"),
    ],
)
def test_what_does_not(model: Path, change: Callable[[Path], object]) -> None:
    before = hashed(model)
    change(model)
    assert hashed(model) == before


def test_versions_differ(model: Path) -> None:
    assert hashed(model, 1) != hashed(model, 2)


def test_files_that_have_changed_since(model: Path) -> None:
    before = loaded(model)
    (model / "1" / "model.py").write_text("another")
    assert ContentHashes().of_version(before, 1) == ""
    (model / "1" / "model.py").unlink()
    assert ContentHashes().of_version(before, 1) == ""


def test_a_file_is_read_once(model: Path) -> None:
    hashes = ContentHashes()
    before, seen = hashes.of_version(loaded(model), 1), (model / "1" / "model.py").stat()
    (model / "1" / "model.py").write_text("eno")
    os.utime(model / "1" / "model.py", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert hashes.of_version(loaded(model), 1) == before


def test_stopped(model: Path) -> None:
    hashes = ContentHashes()
    hashes.stop()
    assert hashes.of_version(loaded(model), 1) == ""


def test_what_was_delivered_counts_as_if_it_were_written(model: Path) -> None:
    config = loaded(model).polled.config
    (model / "config.pbtxt").write_text("# nothing")
    delivered = dataclasses.replace(loaded(model).polled, config=config)
    (model / "config.pbtxt").write_text(CONFIG)
    assert ContentHashes().of_version(LoadedVersion(delivered, catalogue.model_fingerprint(model)), 1) == hashed(model)
