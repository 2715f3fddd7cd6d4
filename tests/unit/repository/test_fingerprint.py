from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nerite.repository.catalogue import ModelFingerprint, directory_fingerprint, model_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    for name, text in {
        "config.pbtxt": "backend: 'python'",
        "labels.txt": "cat\ndog",
        "assets/words/en.txt": "hello",
        "1/model.py": "first",
        "1/data/weights.bin": "w" * 100,
        "20/model.py": "second",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    for path in directory.rglob("*"):
        os.utime(path, ns=(1_000, 1_000))
    return directory


def test_what_belongs_to_whom(model: Path) -> None:
    assert model_fingerprint(model) == ModelFingerprint(
        shared=(("assets/words/en.txt", 5, 1_000), ("labels.txt", 7, 1_000)),
        versions={
            1: (("model.py", 5, 1_000), ("data/weights.bin", 100, 1_000)),
            20: (("model.py", 6, 1_000),),
        },
        config=("config.pbtxt", 17, 1_000),
    )


def rewrite(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text("something longer than it was")


def touch(name: str) -> Callable[[Path], object]:
    return lambda model: os.utime(model / name, ns=(2_000, 2_000))


def remove(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


def add(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text("")


@pytest.mark.parametrize("name", ["labels.txt", "assets/words/en.txt"])
@pytest.mark.parametrize("change", [rewrite, touch, remove])
def test_a_shared_file_changes_what_is_shared(
    model: Path, name: str, change: Callable[[str], Callable[[Path], object]]
) -> None:
    before = model_fingerprint(model)
    change(name)(model)
    after = model_fingerprint(model)
    assert after.shared != before.shared
    assert (after.versions, after.config) == (before.versions, before.config)


@pytest.mark.parametrize("name", ["1/model.py", "1/data/weights.bin"])
@pytest.mark.parametrize("change", [rewrite, touch, remove])
def test_a_file_of_a_version_changes_that_version(
    model: Path, name: str, change: Callable[[str], Callable[[Path], object]]
) -> None:
    before = model_fingerprint(model)
    change(name)(model)
    after = model_fingerprint(model)
    assert after.versions[1] != before.versions[1]
    assert (after.shared, after.versions[20], after.config) == (before.shared, before.versions[20], before.config)


@pytest.mark.parametrize("change", [rewrite, touch, remove])
def test_the_configuration_stands_apart(model: Path, change: Callable[[str], Callable[[Path], object]]) -> None:
    before = model_fingerprint(model)
    change("config.pbtxt")(model)
    after = model_fingerprint(model)
    assert after.config != before.config
    assert (after.shared, after.versions) == (before.shared, before.versions)
    assert after != before


def test_new_files_are_seen(model: Path) -> None:
    before = model_fingerprint(model)
    add("more.txt")(model)
    add("1/more.txt")(model)
    after = model_fingerprint(model)
    assert len(after.shared) == len(before.shared) + 1
    assert len(after.versions[1]) == len(before.versions[1]) + 1


def test_a_version_comes_and_goes(model: Path) -> None:
    (model / "3").mkdir()
    assert model_fingerprint(model).versions[3] == ()
    (model / "20" / "model.py").unlink()
    (model / "20").rmdir()
    assert sorted(model_fingerprint(model).versions) == [1, 3]


def test_python_caches_are_no_change(model: Path) -> None:
    before = model_fingerprint(model)
    for folder in ("", "1", "assets/words"):
        cache = model / folder / "__pycache__"
        cache.mkdir()
        (cache / "model.pyc").write_text("x")
    assert model_fingerprint(model) == before


def test_links_are_followed_to_their_files(model: Path) -> None:
    (model / "1" / "link.txt").symlink_to(model / "labels.txt")
    assert ("link.txt", 7, 1_000) in model_fingerprint(model).versions[1]
    (model / "30").symlink_to(model / "20", target_is_directory=True)
    assert model_fingerprint(model).versions[30] == model_fingerprint(model).versions[20]


def test_what_leads_nowhere_is_left_out(model: Path) -> None:
    before = model_fingerprint(model)
    (model / "broken").symlink_to(model / "none")
    (model / "1" / "broken").symlink_to(model / "none")
    assert model_fingerprint(model) == before


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert model_fingerprint(tmp_path / "none") == ModelFingerprint((), {})
    assert directory_fingerprint(tmp_path / "none") == ()


def test_the_order_on_disk_does_not_matter(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(20)]
    for folder, order in (("one", names), ("other", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_text("x")
            os.utime(tmp_path / folder / name, ns=(1_000, 1_000))
    assert directory_fingerprint(tmp_path / "one") == directory_fingerprint(tmp_path / "other")
