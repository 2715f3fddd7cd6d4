"""docs/openai.md: its model is served, its program prints what it says, and its error is the one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.config.loading import poll_model_directory
from nerite.llm.openai import chat_templates, tool_parsers
from nerite.llm.openai.sampling import COMMON
from serving import PATIENCE, Serving, serving
from tools import require

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(MODEL, SETUP, PROGRAM, PRINTED, COMMAND, ANSWER, PARAMETER) = [text for _, text in BLOCKS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    first, _, source = MODEL.partition("\n")
    path = folder / first.removeprefix("# ")
    path.parent.mkdir(parents=True)
    path.write_text(source)
    install, serve = SETUP.splitlines()
    assert (install, serve) == ("pip install 'nerite[openai]'", "nerite serve models")
    with serving(folder / "models", folder / "log") as running:
        yield running


def test_the_program(server: Serving) -> None:
    program = PROGRAM.replace("localhost:8000", server.http)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert [line.rstrip() for line in done.stdout.splitlines()] == PRINTED.splitlines(), done.stderr


def test_the_error(server: Serving) -> None:
    require("curl")
    command = COMMAND.replace("localhost:8000", f"-sS {server.http}")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout) == json.loads(ANSWER)


def test_the_parameter(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{PARAMETER}')
    (value,) = [each.string_value for each in poll_model_directory(folder, name="m").config.parameters.values()]
    assert value in tool_parsers.ALL


def test_names() -> None:
    """Whatever can be set has its name on the page."""
    for name in (*tool_parsers.ALL, *chat_templates.NAMES, *COMMON, "CHAT_TEMPLATE", "chat_template_kwargs"):
        assert f"`{name}`" in PAGE, name
