from __future__ import annotations

import shutil

import pytest

from nerite.core.errors import InvalidArgument
from nerite.repository.delivery import Delivery, unpack


def delivery(**files: bytes) -> Delivery:
    made = Delivery.of({"config": "{}", **{f"file:{path}": data for path, data in files.items()}})
    assert made is not None
    return made


def test_nothing() -> None:
    assert Delivery.of({}) is None


def test_a_configuration_alone() -> None:
    made = Delivery.of({"config": "{}"})
    assert made is not None
    assert (made.config, made.files) == ("{}", {})


def test_files_need_a_configuration() -> None:
    with pytest.raises(InvalidArgument, match=r"^Load parameter 'config' must be specified for model file override\n"):
        Delivery.of({"file:1/model.py": b""})


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("1/model.py", "1/model.py"),
        ("./1//model.py", "1/model.py"),
        ("1/../2/model.py", "2/model.py"),
        ("1/..hidden", "1/..hidden"),
    ],
)
def test_paths_within(path: str, normal: str) -> None:
    assert delivery(**{path: b"x"}).files == {normal: b"x"}


@pytest.mark.parametrize("path", ["/etc/x", "../x", "1/../../x", "..", ".", "", "//x", "1/\0"])
def test_paths_that_lead_out(path: str) -> None:
    with pytest.raises(InvalidArgument, match="must stay within model directory"):
        delivery(**{path: b""})


def test_unpack() -> None:
    folder = unpack(delivery(**{"1/model.py": b"code", "labels.txt": b"cat"}))
    try:
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert found == {"1/model.py": b"code", "labels.txt": b"cat"}
    finally:
        shutil.rmtree(folder)
