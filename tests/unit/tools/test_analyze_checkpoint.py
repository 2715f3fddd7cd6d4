"""The checkpoint has all that was measured, whenever a run was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument
from nerite.tools.analyze.finding import Figure, Finding
from nerite.tools.analyze.trial import Checkpoint, conditions, differences

CONDITIONS = {"load": {"model": "m", "concurrencies": [1, 8]}, "files": {"m/1/model.py": "7 bytes"}}
ONE = Finding({"instances": 1}, (Figure(1, 10.0, 1.0, 2.0), Figure(8, 30.0, 1.0, 2.0)), 7)
TWO = Finding({"instances": 2, "delay": "off"}, (Figure(1, 20.0, 1.0, 2.0), Figure(8, 40.0, 1.0, 2.0)), 9)
AGAIN = Finding({"instances": 1}, (Figure(8, 31.0, 1.0, 2.0),), 7)
LEVELS = (1, 8)


def test_it_is_there_again(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    first = Checkpoint(file, CONDITIONS)
    assert first.get("one", 0, LEVELS) is None
    first.add("one", 0, ONE)
    first.add("two", 0, TWO)
    first.add("one", 1, AGAIN)
    again = Checkpoint(file, CONDITIONS)
    assert (len(again), again.get("one", 0, LEVELS), again.get("two", 0, LEVELS)) == (3, ONE, TWO)
    assert again.get("one", 1, (8,)) == AGAIN
    assert again.get("one", 1, (1,)) is again.get("one", 2, (8,)) is again.get("one", 0, (8,)) is None


def test_half_a_line_goes(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    before = Checkpoint(file, CONDITIONS)
    before.add("one", 0, ONE)
    before.add("two", 0, TWO)
    file.write_bytes(file.read_bytes()[:-20])
    again = Checkpoint(file, CONDITIONS)
    assert (len(again), again.get("two", 0, LEVELS)) == (1, None)
    again.add("two", 0, TWO)
    assert Checkpoint(file, CONDITIONS).get("two", 0, LEVELS) == TWO


def test_other_conditions_are_told_and_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    Checkpoint(file, CONDITIONS).add("one", 0, ONE)
    changed = {"load": CONDITIONS["load"], "files": {"m/1/model.py": "8 bytes", "m/names": "1 bytes"}}
    with pytest.raises(InvalidArgument) as refusal:
        Checkpoint(file, changed)
    told = str(refusal.value)
    assert "m/1/model.py: 7 bytes then, 8 bytes now" in told
    assert "m/names: nothing then, 1 bytes now" in told
    assert "the load" not in told
    assert "Remove it" in told


def test_conditions_notice_what_figures_depend_on(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text("one")
    (model / "config.pbtxt").write_text("")
    config = ModelConfig(name="m", backend="onnxruntime")
    before = conditions({"window": 1}, {model: config}, ["m"])
    assert differences(before, conditions({"window": 1}, {model: config}, ["m"])) == []
    assert before["software"]["onnxruntime"]
    assert before["machine"]["cores"] >= 1
    # What is varied is known by what its configuration says; what is not, by how it looks.
    (model / "config.pbtxt").write_text("max_batch_size: 1")
    assert differences(before, conditions({"window": 1}, {model: config}, ["m"])) == []
    assert list(conditions({}, {model: config}, [])["files"]) == ["m/config.pbtxt", "m/1/model.py"]
    (model / "1" / "model.py").write_text("other")
    (told, changed) = differences(before, conditions({"window": 1}, {model: config}, ["m"]))
    assert told == "the files of the models:"
    assert changed.startswith("    m/1/model.py: 3 bytes of ") and " then, 5 bytes of " in changed


@pytest.mark.parametrize("content", ["something else", "{}\n", "[]\n", f'{json.dumps(CONDITIONS)}\n{{"a": 1}}\n'])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match="checkpoint"):
        Checkpoint(file, CONDITIONS)
    assert file.read_text() == content
