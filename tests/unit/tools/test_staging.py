"""A model takes its place in one step, or leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.artifacts.artifact import Artifact
from nerite.core.errors import AlreadyExists, Internal
from nerite.tools.add import destination as exchange
from nerite.tools.add.destination import destination
from nerite.tools.add.order import Staging


def artifact(folder: Path, content: str = "new", **more: object) -> Artifact:
    folder.mkdir(exist_ok=True)
    source = folder / "net.bin"
    source.write_text(content)
    return Artifact("thing", source, "net", files={"model.bin": source, "parts/deep.bin": source}, **more)  # type: ignore[arg-type]


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def place(repository: Path, what: Artifact, version: int | None = None, *, force: bool = False) -> None:
    with Staging(destination(repository, "net", version, force=force)) as staging:
        staging.lay_out(what, lambda count: None)
        staging.write("note.txt", "noted")
        staging.take_place()


def test_a_repository_that_cannot_be_written_is_not_made(tmp_path: Path) -> None:
    # Long enough for the directories, and too long for the one that the model is laid out in.
    repository = tmp_path / "a" / "b"
    while len(str(repository)) < 4080:
        repository /= "x" * min(200, 4080 - len(str(repository)))
    with pytest.raises(Internal, match="is not writable: File name too long"):
        place(repository, artifact(tmp_path / "source"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_new_model_in_a_new_repository(tmp_path: Path) -> None:
    counted: list[int] = []
    with Staging(destination(tmp_path / "a" / "models", "net", None, force=False)) as staging:
        staging.lay_out(artifact(tmp_path / "source"), counted.append)
        assert [path.name for path in (tmp_path / "a" / "models").iterdir()] == [staging.repository.name]
        assert staging.repository.name.startswith(".")
        staging.take_place()
    assert tree(tmp_path / "a") == {"models/net/1/model.bin": "new", "models/net/1/parts/deep.bin": "new"}
    assert sum(counted) == 6


def test_what_did_not_take_its_place_is_gone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Staging(destination(tmp_path / "a" / "m", "net", 1, force=False)) as staging:
        staging.lay_out(artifact(tmp_path / "source"), lambda count: None)
        raise RuntimeError
    assert not (tmp_path / "a").exists()


def test_another_version_has_what_the_model_shares(tmp_path: Path) -> None:
    place(tmp_path / "models", artifact(tmp_path / "source", "one"))
    (tmp_path / "models" / "net" / "labels.txt").write_text("a")
    with Staging(destination(tmp_path / "models", "net", 2, force=False)) as staging:
        staging.lay_out(artifact(tmp_path / "source", "two"), lambda count: None)
        assert (staging.directory / "labels.txt").read_text() == "a"
        staging.take_place()
    assert tree(tmp_path / "models" / "net") == {
        "1/model.bin": "one",
        "1/parts/deep.bin": "one",
        "2/model.bin": "two",
        "2/parts/deep.bin": "two",
        "labels.txt": "a",
        "note.txt": "noted",
    }


@pytest.mark.parametrize("at_once", [True, False])
def test_replacing(tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(exchange, "exchanged_atomically", lambda one, other: False)
    place(tmp_path / "models", artifact(tmp_path / "source", "one"))
    (tmp_path / "models" / "net" / "labels.txt").write_text("a")
    place(tmp_path / "models", artifact(tmp_path / "source", "two"), 1, force=True)
    assert tree(tmp_path / "models" / "net")["1/model.bin"] == "two"
    assert tree(tmp_path / "models" / "net")["labels.txt"] == "a"
    place(tmp_path / "models", artifact(tmp_path / "source", "three"), force=True)
    assert tree(tmp_path / "models") == {
        "net/1/model.bin": "three",
        "net/1/parts/deep.bin": "three",
        "net/note.txt": "noted",
    }


def test_taken_back(tmp_path: Path) -> None:
    for version, force in ((None, False), (None, True), (1, True), (2, False)):
        before = tree(tmp_path / "models") if (tmp_path / "models").exists() else {}
        with (
            pytest.raises(RuntimeError),
            Staging(destination(tmp_path / "models", "net", version, force=force)) as staging,
        ):
            staging.lay_out(artifact(tmp_path / "source", "two"), lambda count: None)
            staging.take_place()
            assert tree(tmp_path / "models" / "net") != before
            with staging.taken_back_on_error():
                raise RuntimeError
        assert (tree(tmp_path / "models") if (tmp_path / "models").exists() else {}) == before
        if not before:
            place(tmp_path / "models", artifact(tmp_path / "source", "one"))


def test_somebody_was_faster(tmp_path: Path) -> None:
    with Staging(destination(tmp_path / "models", "net", None, force=False)) as staging:
        staging.lay_out(artifact(tmp_path / "source"), lambda count: None)
        (tmp_path / "models" / "net" / "1").mkdir(parents=True)
        with pytest.raises(AlreadyExists, match="was created in the meantime"):
            staging.take_place()


def test_a_file_that_cannot_be_copied(tmp_path: Path) -> None:
    broken = Artifact("thing", tmp_path, "net", files={"model.bin": tmp_path / "absent"})
    with (
        Staging(destination(tmp_path / "models", "net", None, force=False)) as staging,
        pytest.raises(Internal, match=r"could not be copied: .*absent: No such file"),
    ):
        staging.lay_out(broken, lambda count: None)
