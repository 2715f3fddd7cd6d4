"""The directories of a repository that are models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nerite.repository.repositories import LocalRepository


@pytest.fixture
def repository(tmp_path: Path) -> LocalRepository:
    for name in ("models/b", "models/a", "models/.hidden", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "file").touch()
    return LocalRepository(str(tmp_path / "models"))


def test_models_are_directories(repository: LocalRepository, tmp_path: Path) -> None:
    assert repository.models() == ["a", "b"]
    assert repository.fetch("a") == tmp_path / "models" / "a"
    assert repository.fetch("c") is None
    assert repository.fetch("file") is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "../elsewhere", "/", "/etc", "a/.", "a/../b", "\0", "m" * 300]
)
def test_a_name_is_no_path(repository: LocalRepository, name: str) -> None:
    assert repository.fetch(name) is None


def test_a_directory_whose_name_is_no_text_is_no_model(
    repository: LocalRepository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkdir(os.fsencode(tmp_path / "models") + b"/gr\xfcn")
    for _ in range(2):
        assert repository.models() == ["a", "b"]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.endswith("is not a model: its name is not valid UTF-8, or has control characters")
    assert message.encode()
