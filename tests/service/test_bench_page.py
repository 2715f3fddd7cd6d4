"""docs/bench.md is run: each of its commands, briefly."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ROOT, Page, rows, run
from serving import Serving, serving

PAGE = Page("docs/bench.md")
BRIEF = "--warm-up 0.1 --window 0.1 --windows 3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bench_page")
    shutil.copytree(ROOT / "examples" / "sources" / "scaler", folder / "models" / "scaler")
    with serving(folder / "models", folder / "log") as running:
        yield running


COMMANDS = [line for language, text in PAGE.blocks if language == "sh" for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(server: Serving, command: str, tmp_path: Path) -> None:
    assert "| Requests/s |" in run(f"{command} {BRIEF} --url {server.http}", cwd=tmp_path)


def test_options_are_those_of_the_help() -> None:
    told = set(re.findall(r"--\w[\w-]*", run("nerite bench --help")))
    described = set(re.findall(r"--\w[\w-]*", (ROOT / "docs" / "bench.md").read_text()))
    assert described <= told
    tables = set(re.findall(r"--\w[\w-]*", " ".join(rows("docs/bench.md", "option"))))
    assert told - tables <= {
        "--help",
        "--version",
        "--json",
        "--csv",
        "--html",
        "--processes",
        "--protocol",
        "--url",
        "--header",
    }
