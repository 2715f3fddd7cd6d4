"""The checkpoint has all that was measured, whenever a run was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.analyze.checkpoint import Checkpoint
from nerite.analyze.finding import Figure, Finding
from nerite.core.errors import InvalidArgument

CONDITIONS = {"model": "m", "concurrencies": [1, 8]}
ONE = Finding({"instances": 1}, (Figure(1, 10.0, 1.0, 2.0),), 7)
TWO = Finding({"instances": 2, "delay": "off"}, (Figure(1, 20.0, 1.0, 2.0),), 9)


def test_it_is_there_again(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    first = Checkpoint(file, CONDITIONS)
    assert first.get("one") is None
    first.add("one", ONE)
    first.add("two", TWO)
    again = Checkpoint(file, CONDITIONS)
    assert (again.found, again.get("one"), again.get("two")) == (2, ONE, TWO)


def test_half_a_line_goes(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    before = Checkpoint(file, CONDITIONS)
    before.add("one", ONE)
    before.add("two", TWO)
    file.write_bytes(file.read_bytes()[:-20])
    again = Checkpoint(file, CONDITIONS)
    assert (again.found, again.get("two")) == (1, None)
    again.add("two", TWO)
    assert Checkpoint(file, CONDITIONS).get("two") == TWO


def test_other_conditions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    Checkpoint(file, CONDITIONS).add("one", ONE)
    with pytest.raises(InvalidArgument, match="other conditions"):
        Checkpoint(file, {**CONDITIONS, "concurrencies": [1]})


@pytest.mark.parametrize("content", ["something else", "{}\n", '{"model": "m", "concurrencies": [1, 8]}\n{"a": 1}\n'])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match="checkpoint"):
        Checkpoint(file, CONDITIONS)
    assert file.read_text() == content
