"""docs/python-models.md: every model and configuration on it loads, answers, and passes its own test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from nerite.config.text import parse_text
from nerite.testing import load_model
from serving import PATIENCE

PAGE = Path(__file__).parents[3] / "docs" / "python-models.md"


class Block(NamedTuple):
    """A fenced block; its first line says which file it is."""

    language: str
    file: str
    added: bool
    text: str


def blocks() -> list[Block]:
    found = []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        name, _, rest = text.partition("\n")
        path, _, remark = name.removeprefix("# ").partition(", ")
        found.append(Block(language, path, remark == "in addition", rest))
    return found


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in blocks():
        if block.language in ("python", "pbtxt") and not block.added:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def test_the_page_has_what_is_tested_here() -> None:
    assert [block.file for block in blocks() if block.language != "sh" and not block.added] == [
        "models/doubler/1/model.py",
        "models/doubler/config.pbtxt",
        "test_doubler.py",
        "models/longest/1/model.py",
        "models/countdown/1/model.py",
        "models/fetcher/1/model.py",
        "models/judge/1/model.py",
        "test_judge.py",
        "models/counter/1/model.py",
    ]


def test_the_first_model_is_short() -> None:
    assert len([line for line in blocks()[0].text.splitlines() if line]) <= 15


@pytest.mark.parametrize("file", ["test_doubler.py", "test_judge.py"])
def test_its_tests_pass(file: str, models: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_inputs_of_two_lengths_in_one_batch(models: Path) -> None:
    with load_model(models / "longest") as model:
        short, long = model.execute([{"AUDIO": [[1.0, -3.0]]}, {"AUDIO": [[0.5, 0.25, 2.0]]}])
    assert isinstance(short, dict)
    assert isinstance(long, dict)
    assert (short["LOUDEST"].tolist(), long["LOUDEST"].tolist()) == ([[3.0]], [[2.0]])


def test_several_responses(models: Path) -> None:
    with load_model(models / "countdown") as model:
        answers = model.stream({"FROM": np.array([3], np.int32)})
        assert [int(answer["NOW"][0]) for answer in answers if isinstance(answer, dict)] == [3, 2, 1]
        (only,) = model.execute([{"FROM": np.array([1], np.int32)}])
        assert isinstance(only, dict)
        (wrong,) = model.execute([{"FROM": np.array([2], np.int32)}])
        assert "the model sent 2 responses, but one is expected" in str(wrong)


def test_coroutine(models: Path) -> None:
    with load_model(models / "fetcher") as model:
        assert model.infer({"KEY": ["a"]})["VALUE"].tolist() == [b"value of a"]


def test_metrics_and_logs(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with load_model(models / "counter") as model:
        model.infer({"INPUT0": np.zeros(3, np.float32)})
        model.infer({"INPUT0": np.zeros(4, np.float32)})
    assert [record.getMessage() for record in caplog.records] == ["counter_0 is ready to count", "7 rows"]
    assert {record.filename for record in caplog.records} == {"model.py"}


@pytest.mark.parametrize("key", ["EXECUTION_MODE", "WORKER"])
def test_additions_to_a_configuration(key: str, models: Path) -> None:
    (addition,) = (block for block in blocks() if block.added and key in block.text)
    text = (models.parent / addition.file).read_text() + addition.text
    parsed = parse_text(text)
    assert not parsed.mistakes
    assert list(parsed.config.parameters) == [key]
    (models.parent / addition.file).write_text(text)
    with load_model(models / "doubler") as model:
        assert model.infer({"INPUT0": [[1.0]]})["OUTPUT0"].tolist() == [[2.0]]
