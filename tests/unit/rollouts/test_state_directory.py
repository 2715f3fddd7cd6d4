"""Files that keep the state of rollouts: whole or not at all, whatever the models are called."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nerite.core.errors import Unavailable
from nerite.rollouts.state_directory import VERSION, StateDirectory, StateWriter, state_directory


def saved(folder: Path, *names: str) -> StateWriter:
    with ThreadPoolExecutor(2) as pool:
        writer = StateWriter(StateDirectory(folder), pool)
        for name in names:
            writer.save(name, {"of": name})
        writer.flush()
    return writer


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    names = ("resnet", "../up", "a/b", ".hidden", "c:d", "ü" * 100, "x" * 1024, "y" * 1023 + "z")
    saved(tmp_path / "state", *names)
    found = list(StateDirectory(tmp_path / "state").read())
    assert {each.model: each.document["of"] for each in found} == {name: name for name in names}
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / "state"}
    assert not list(tmp_path.rglob("*.new"))


def test_the_last_document_of_a_model_stays(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        writer = StateWriter(StateDirectory(tmp_path), pool)
        for number in range(200):
            writer.save("m", {"number": number})
            writer.save("other", {"number": number} if number % 2 else None)
    (m, other) = StateDirectory(tmp_path).read()
    assert (m.document["number"], other.document["number"]) == (199, 199)


def test_a_document_is_removed(tmp_path: Path) -> None:
    writer = saved(tmp_path, "m")
    writer.save("m", None)
    writer.flush()
    assert list(StateDirectory(tmp_path).read()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "it is not the state of a rollout"),
        (json.dumps({"version": VERSION}), "it is not the state of a rollout"),
        (json.dumps({"version": VERSION + 1, "model": "m"}), f"its version is {VERSION + 1}, and this server reads"),
    ],
)
def test_a_file_of_another_form_is_told_and_left(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "m.json").write_text(text)
    (found,) = StateDirectory(tmp_path).read()
    assert why in found.problem and str(tmp_path / "m.json") in found.problem
    assert (tmp_path / "m.json").read_text() == text


def test_a_crash_while_writing_leaves_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = saved(tmp_path, "m")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer.save("m", {"of": "the new one"})
    writer.flush()
    assert "No space left on device" in writer.problem
    (found,) = StateDirectory(tmp_path).read()
    assert found.document["of"] == "m"
    monkeypatch.undo()
    writer.save("m", {"of": "the new one"})
    writer.flush()
    assert writer.problem == ""


def test_a_directory_that_cannot_be_written_is_refused_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="--rollout-state"):
        StateDirectory(tmp_path / "file" / "state").prepare()
    StateDirectory(tmp_path / "deep" / "state").prepare()
    assert list((tmp_path / "deep" / "state").iterdir()) == []


def test_where_the_files_are() -> None:
    home = {"HOME": "/home/u"}
    usual = state_directory("", ["/models"], "a:8000", home)
    assert usual.parent == Path("/home/u/.local/state/nerite/rollouts")
    assert usual == state_directory("", ["/models"], "a:8000", home)
    assert usual != state_directory("", ["/other"], "a:8000", home)
    assert usual != state_directory("", ["/models"], "a:8001", home)
    assert state_directory("", ["/models"], "a", {"XDG_STATE_HOME": "/s", **home}).parent == Path("/s/nerite/rollouts")
    assert state_directory("/mine", ["/models"], "a", home) == Path("/mine")
