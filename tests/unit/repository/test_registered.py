"""Repositories that come and go: names that are given, and those that are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import AlreadyExists
from nerite.repository.repositories import RegisteredRepository, RepositoryRegister


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("ensemble", "part"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_model_has_its_given_name_and_no_other(root: Path) -> None:
    repository = RegisteredRepository(str(root), {"ensemble": "team/hash.tar.gz"})
    assert repository.models() == ["part", "team/hash.tar.gz"]
    assert repository.fetch("team/hash.tar.gz") == root / "ensemble"
    assert repository.fetch("part") == root / "part"
    assert repository.fetch("ensemble") is None
    assert repository.fetch("other") is None
    assert repository.holds(root / "ensemble")
    assert not repository.holds(root / "ensemble" / "1")


def test_a_given_name_may_be_that_of_the_folder(root: Path) -> None:
    repository = RegisteredRepository(str(root), {"part": "part"})
    assert repository.models() == ["ensemble", "part"]
    assert repository.fetch("part") == root / "part"


def test_no_model_is_without_a_name(root: Path) -> None:
    assert RegisteredRepository(str(root), {"part": ""}).fetch("") is None


def test_a_directory_that_is_gone_has_no_models(tmp_path: Path) -> None:
    repository = RegisteredRepository(str(tmp_path / "gone"), {"model": "hash"})
    assert repository.models() == []
    assert repository.fetch("hash") is None


def test_each_repository_once() -> None:
    register = RepositoryRegister()
    first, second = RegisteredRepository("/a", {"model": "x"}), RegisteredRepository("/a", {"model": "y"})
    register.add(first)
    with pytest.raises(AlreadyExists, match=r"^model repository '/a' has already been registered$"):
        register.add(second)
    register.remove(first)
    register.add(second)
    assert list(register) == [second]


def test_each_given_name_once() -> None:
    register = RepositoryRegister()
    register.add(RegisteredRepository("/a", {"model": "x"}))
    with pytest.raises(AlreadyExists, match=r"^failed to register 'x', there is a conflicting mapping for 'x'$"):
        register.add(RegisteredRepository("/b", {"other": "x"}))
    assert [repository.location for repository in register] == ["/a"]
