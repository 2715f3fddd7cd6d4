"""docs/analyze.md is run: each of its commands, briefly."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from nerite.tools.analyze.search import SETTINGS
from pages import ROOT, Page, rows, run

PAGE = Page("docs/analyze.md")
BRIEF = "--warm-up 0.05 --window 0.05 --windows 3"
FEW = "--most 2"
COMMANDS = [line for language, text in PAGE.blocks if language == "sh" for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path) -> None:
    for model in ("scaler", "digits_preprocess"):
        shutil.copytree(ROOT / "examples" / "sources" / model, tmp_path / "models" / model)
    printed = run(f"{command} {BRIEF} {FEW}", cwd=tmp_path)
    assert "| Settings " in printed
    assert "current configuration: " in printed
    assert len(list(tmp_path.glob("scaler*.analysis.jsonl"))) == 1


def test_settings_are_those_there_are() -> None:
    assert set(rows("docs/analyze.md", "setting")) == set(SETTINGS)


def test_options_are_those_of_the_help() -> None:
    told = set(re.findall(r"--\w[\w-]*", run("nerite analyze --help")))
    described = set(re.findall(r"--\w[\w-]*", (ROOT / "docs" / "analyze.md").read_text()))
    assert told - described == {"--help", "--model-repository"}
    assert described <= told
