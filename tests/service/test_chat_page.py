"""docs/chat.md is run: its commands and its program, with a model whose weights are random."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from llm_models import language_model
from nerite.tools.chat import COMMANDS
from pages import ROOT, Page, rows, run
from serving import Serving, serving

PAGE = Page("docs/chat.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("chat_page")
    (folder / "models" / "docent").mkdir(parents=True)
    language_model(folder / "models" / "docent" / "1")
    with serving(folder / "models", folder / "log") as running:
        yield running


def test_a_pipe(server: Serving) -> None:
    first, second = PAGE.block("| nerite chat").splitlines()
    for command in (f"{first} --max-tokens 8", second.replace("git log -3", "echo 'What is new?'")):
        assert run(f"{command} --url {server.http}")


def test_the_program(server: Serving) -> None:
    printed = run([sys.executable, "-c", PAGE.block("client.chat(")], server)
    assert re.search(r"\d+ tokens\n$", printed)


def test_the_tables_and_the_example(server: Serving) -> None:
    text = (ROOT / "docs" / "chat.md").read_text()
    for command in COMMANDS:
        assert f"`{command}" in text
    assert PAGE.block("nerite chat docent\n") == "nerite chat docent\n"
    told = run("nerite chat --help")
    for option in re.findall(r"--[\w-]+", " ".join(rows("docs/chat.md", "option"))):
        assert option in told
