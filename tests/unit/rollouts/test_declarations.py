"""``rollout.toml`` beside a model: what two readings agree on counts, and no mistake does harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.work_loop import WorkLoop
from nerite.repository.catalogue import ROLLOUT_FILE, model_fingerprint
from nerite.rollouts.declarations import Declarations, DeclaredRollout, baselines_in, read_now


class Changes:
    """Files of some models, and what was told of them."""

    def __init__(self, repository: Path, *models: str) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.files = Declarations(self._changed, WorkLoop("rollouts"))
        self.repository = repository
        for model in models:
            (repository / model).mkdir(parents=True)
        self.files.follow({model: repository / model for model in models})

    def _changed(self, model: str, file: DeclaredRollout) -> None:
        self.told.append((model, "" if file.spec is None else file.spec.to, file.problem))

    def write(self, model: str, text: str) -> None:
        (self.repository / model / ROLLOUT_FILE).write_text(text)

    def look(self) -> list[tuple[str, str, str]]:
        """Read twice; return what was told."""
        self.told.clear()
        self.files.see(self.files.read())
        self.files.see(self.files.read())
        return list(self.told)


def test_only_what_two_readings_agree_on_counts(tmp_path: Path) -> None:
    changes = Changes(tmp_path, "m")
    assert changes.look() == []
    changes.write("m", 'to = "2"')
    changes.files.see(changes.files.read())
    assert changes.told == []
    changes.write("m", 'to = "3"')
    assert changes.look() == [("m", "3", "")]
    assert changes.look() == []


def test_a_mistake_is_told_and_the_last_content_stays(tmp_path: Path) -> None:
    changes = Changes(tmp_path, "m", "other")
    changes.write("m", 'to = "2"')
    assert changes.look() == [("m", "2", "")]
    changes.write("m", 'to = "2"\nhold = "soon"\n')
    ((model, to, problem),) = changes.look()
    assert (model, to) == ("m", "2")
    assert problem == f"{tmp_path}/m/rollout.toml:2: hold: must be a duration, as in 30s, 5m or 1h30m"
    changes.write("m", 'to = "4"')
    assert changes.look() == [("m", "4", "")]
    (tmp_path / "m" / ROLLOUT_FILE).unlink()
    ((model, to, problem),) = changes.look()
    assert to == "4" and "is gone" in problem


@pytest.mark.parametrize("text", [b"\xff", b"to = ", b"x" * 100_000])
def test_a_file_that_is_none(tmp_path: Path, text: bytes) -> None:
    changes = Changes(tmp_path, "m")
    (tmp_path / "m" / ROLLOUT_FILE).write_bytes(text)
    ((_, to, problem),) = changes.look()
    assert to == "" and problem.startswith(f"{tmp_path}/m/rollout.toml")
    assert read_now(tmp_path / "m") is None


def test_models_come_and_go(tmp_path: Path) -> None:
    changes = Changes(tmp_path, "m", "n")
    changes.write("m", 'to = "2"')
    changes.write("n", 'to = "2"')
    changes.files.follow({"n": tmp_path / "n"})
    assert changes.look() == [("n", "2", "")]
    changes.files.follow({"n": tmp_path / "n", "m": tmp_path / "m"})
    assert changes.look() == [("m", "2", "")]


def test_what_is_declared_before_the_start(tmp_path: Path) -> None:
    Changes(tmp_path, "m", "n", "o")
    (tmp_path / "m" / ROLLOUT_FILE).write_text('to = "2"\nfrom = "1"')
    (tmp_path / "n" / ROLLOUT_FILE).write_text("to = ")
    (tmp_path / "o" / ROLLOUT_FILE).write_text('to = "2"')
    assert baselines_in([str(tmp_path), "s3://bucket/models"]) == {"m": "1"}


def test_a_change_of_the_file_reloads_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("")
    before = model_fingerprint(tmp_path)
    (tmp_path / ROLLOUT_FILE).write_text('to = "2"')
    assert model_fingerprint(tmp_path) == before
