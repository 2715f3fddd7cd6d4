"""docs/bench.md is run: each of its commands, briefly."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_models import language_model
from pages import ROOT, Page, rows, run
from reading_models import embedding_model
from serving import Serving, serving

PAGE = Page("docs/bench.md")
BRIEF = "--warm-up 0.1 --window 0.1 --windows 3"


COMMANDS = [line for language, text in PAGE.blocks if language == "sh" for line in text.splitlines()]
COMPARE = "nerite bench compare "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bench_page")
    shutil.copytree(ROOT / "examples" / "sources" / "scaler", folder / "models" / "scaler")
    (folder / "models" / "docent").mkdir()
    language_model(folder / "models" / "docent" / "1")
    (folder / "models" / "vectors").mkdir()
    embedding_model(folder / "models" / "vectors" / "1")
    with serving(folder / "models", folder / "log") as running:
        yield running


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith(COMPARE)])
def test_commands(server: Serving, command: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(PAGE.block('{"data"'))
    (tmp_path / "prompts.txt").write_text('What is new?\n{"prompt": "And then?"}\n')
    (tmp_path / "trace.jsonl").write_text(PAGE.block('{"timestamp"'))
    whole = "--requests" in command or "--replay" in command
    # A window must see the end of a long answer, even while the machine is busy.
    windows = BRIEF.replace("--window 0.1", "--window 1") if "--output-length" in command else BRIEF
    printed = run(f"{command} {'' if whole else windows} --url {server.http}", cwd=tmp_path)
    assert "| Requests/s |" in printed
    assert ("| First ms |" in printed) == ("openai" in command and "embeddings" not in command)
    assert ("| Texts/s |" in printed) == ("--texts" in command)
    assert ("| Good/s |" in printed) == ("--slo" in command)
    assert ("| Cancelled |" in printed) == ("--cancel-rate" in command)


def test_reports_are_compared(server: Serving, tmp_path: Path) -> None:
    for command in COMMANDS:
        if "before.json" in command or "after.json" in command:
            compares = command.startswith(COMPARE)
            printed = run(command if compares else f"{command} {BRIEF} --url {server.http}", cwd=tmp_path)
    assert compares and "| concurrency 8 | requests/s" in printed


def test_options_are_those_of_the_help() -> None:
    told = set(re.findall(r"--\w[\w-]*", run("nerite bench --help")))
    ours, _, _ = (ROOT / "docs" / "bench.md").read_text().partition("## perf_analyzer and Model Analyzer")
    described = set(re.findall(r"--\w[\w-]*", ours))
    assert described - {"--allow-client-shm"} <= told
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
