"""``nerite batch``: what it refuses before it asks a server, and how a lost server is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nerite.tools.batch import run

LINE = '{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(LINE)
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--window=soon"], "--window must be a duration such as 30m or 24h, got 'soon'"),
        (["--metadata=night"], "--metadata must be KEY=VALUE, got 'night'"),
    ],
)
def test_mistakes(file: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(file), "-o", str(file.parent / "out"), "--url=localhost:1", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(tmp_path / "none"), "-o", "out", "--url=localhost:1"]) == 1
    assert f"cannot read '{tmp_path / 'none'}': No such file or directory" in capsys.readouterr().err


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["list"], ["cancel", "batch_1"]])
def test_no_server(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--url=localhost:1"]) == 1
    assert "Is a server running there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("{", "is not readable: remove it to start a new batch"),
        (json.dumps({"batch": "batch_1"}), "is not readable: remove it to start a new batch"),
        (json.dumps({"batch": "batch_1", "input_sha256": "0"}), "has changed since batch batch_1 was created"),
    ],
)
def test_the_state_of_an_earlier_run(file: Path, state: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "out.batch").write_text(state)
    assert run(["run", str(file), "-o", str(file.parent / "out"), "--url=localhost:1"]) == 1
    assert says in capsys.readouterr().err


def test_an_input_that_is_no_batch(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("question\n")
    assert run(["run", str(file), "-o", str(file.parent / "out"), "--url=localhost:1"]) == 1
    assert "the first line of the input file is not a request with a 'url'" in capsys.readouterr().err
