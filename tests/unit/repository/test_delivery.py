from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument
from nerite.repository.repositories import LoadOverrides, check_file_names, new_override_folder, write_files


def delivery(**files: bytes) -> LoadOverrides:
    made = LoadOverrides.of({"config": "{}", **{f"file:{path}": data for path, data in files.items()}})
    assert made is not None
    return made


def test_nothing() -> None:
    assert LoadOverrides.of({}) is None


def test_a_configuration_alone() -> None:
    made = LoadOverrides.of({"config": "{}"})
    assert made is not None
    assert (made.config, made.files) == ("{}", {})


def test_files_need_a_configuration() -> None:
    with pytest.raises(InvalidArgument, match=r"^Load parameter 'config' must be specified for model file override\n"):
        LoadOverrides.of({"file:1/model.py": b""})


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("1/model.py", "1/model.py"),
        ("./1//model.py", "1/model.py"),
        ("1/../2/model.py", "2/model.py"),
        ("1/..hidden", "1/..hidden"),
        ("/1/model.py", "1/model.py"),
        ("//x", "x"),
    ],
)
def test_paths_within(path: str, normal: str) -> None:
    assert delivery(**{path: b"x"}).files == {normal: b"x"}


@pytest.mark.parametrize("path", ["/../x", "../x", "1/../../x", "..", ".", "", "/", "1/\0"])
def test_paths_that_lead_out(path: str) -> None:
    with pytest.raises(InvalidArgument, match="must stay within model directory"):
        delivery(**{path: b""})


@pytest.mark.parametrize("first", [True, False])
def test_a_file_is_no_directory(first: bool) -> None:
    files = {"1/a/b": b"", "1/a": b""}
    with pytest.raises(InvalidArgument, match="'file:1/a/b': 'file:1/a' is a file and not a directory"):
        delivery(**dict(sorted(files.items(), reverse=first)))


def test_names_that_no_file_can_have() -> None:
    check_file_names(["config", "file:1/" + "é" * 127])
    with pytest.raises(InvalidArgument, match="a name in its path is longer than 255 bytes"):
        check_file_names(["config", "file:1/" + "é" * 128])


def test_unpack(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    write_files(delivery(**{"1/model.py": b"code", "labels.txt": b"cat"}), folder)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {"1/model.py": b"code", "labels.txt": b"cat"}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_are_new_and_do_not_exist() -> None:
    one, other = new_override_folder(), new_override_folder()
    assert one != other
    assert not one.exists()
