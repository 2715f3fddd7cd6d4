"""Names, places, and what is there already."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import AlreadyExists, InvalidArgument, NeriteError, NotFound
from nerite.tools.add.destination import (
    Destination,
    check_name,
    destination,
    existing_model,
    fit_name,
    remove_model,
    repository_at,
    to_remove,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for version in (1, 3):
        (tmp_path / "detector" / str(version)).mkdir(parents=True)
        (tmp_path / "detector" / str(version) / "model.onnx").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("suggested", "name"),
    [("resnet50", "resnet50"), ("my net (final).v2", "my_net_final_v2"), (".hidden", "hidden"), ("模型", "model")],
)
def test_a_name_that_fits(suggested: str, name: str) -> None:
    assert fit_name(suggested) == name
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a\0b"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid model name"):
        check_name(name)


def test_where_the_repository_is(tmp_path: Path) -> None:
    assert repository_at("", {}) == Path("models")
    assert repository_at("", {"NERITE_MODEL_REPOSITORY": "/srv/a\n/srv/b"}) == Path("/srv/a")
    assert repository_at("here", {"NERITE_MODEL_REPOSITORY": "/srv/a"}) == Path("here")
    with pytest.raises(InvalidArgument, match=r"is the name of a model.*\n.*nerite add hf:org/name"):
        repository_at("hf:org/name", {})
    with pytest.raises(InvalidArgument, match="object store"):
        repository_at("s3://bucket/models", {})
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="is not a directory"):
        repository_at(str(tmp_path / "file"), {})


def test_new_places(repository: Path) -> None:
    assert destination(repository, "new", None, force=False) == Destination(repository, "new", 1)
    assert destination(repository, "new", 7, force=True) == Destination(repository, "new", 7)
    assert destination(repository, "detector", 2, force=False) == Destination(repository, "detector", 2, "", joins=True)


def test_places_that_are_taken(repository: Path) -> None:
    with pytest.raises(AlreadyExists, match=r"already exists .*, with versions 1, 3\.\n.* --version 4"):
        destination(repository, "detector", None, force=False)
    with pytest.raises(AlreadyExists, match=r"version 3 of .* already exists .*\n.* --version 4"):
        destination(repository, "detector", 3, force=False)
    assert destination(repository, "detector", None, force=True).replaces == "model"
    assert destination(repository, "detector", 3, force=True) == Destination(
        repository, "detector", 3, "version", joins=True
    )


def test_a_model_that_is_not_there(repository: Path) -> None:
    with pytest.raises(NotFound, match="Did you mean 'detector'"):
        existing_model(repository, "detecter")
    with pytest.raises(NotFound, match="Models in it: detector"):
        existing_model(repository, "x")
    for name in ("..", "", "detector/1", ".hidden"):
        with pytest.raises(NotFound):
            existing_model(repository, name)
    with pytest.raises(NotFound, match=r"the repository .* does not exist"):
        existing_model(repository / "absent", "x")


def test_removal(repository: Path) -> None:
    remove_model(repository, to_remove(repository, "detector", 1))
    assert [child.name for child in (repository / "detector").iterdir()] == ["3"]
    for version, says in ((1, "has no version 1"), (3, "version 3 is the only one")):
        with pytest.raises(NeriteError, match=says):
            to_remove(repository, "detector", version)
    remove_model(repository, to_remove(repository, "detector", None))
    assert list(repository.iterdir()) == []
