"""docs/http.md: its models are served, and each of its curl commands has the answer that stands below it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import PIL.Image
import pytest

from serving import Serving, serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ASKED = [
    (command, answer) for (language, command), (_, answer) in pairwise(BLOCKS) if language == "sh" and "curl" in command
]
(SETUP,) = [text for language, text in BLOCKS if language == "sh" and "curl" not in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models, and the files that are sent."""
    made = tmp_path_factory.mktemp("page")
    for language, text in BLOCKS:
        if language == "python":
            first, _, source = text.partition("\n")
            path = made / first.removeprefix("# ")
            path.parent.mkdir(parents=True)
            path.write_text(source)
    (made / "hello.wav").write_bytes(b"hello")
    PIL.Image.new("RGB", (40, 30), (255, 128, 0)).save(made / "orange.png")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    install, serve = SETUP.splitlines()
    assert install == "pip install 'nerite[image]'"
    command, repository, *flags = serve.removeprefix("nerite ").split()
    assert command == "serve"
    with serving(folder / repository, folder / "log", *flags) as running:
        yield running


def test_every_command_has_an_answer() -> None:
    languages = [language for language, _ in BLOCKS]
    assert languages == ["python", "python", "sh", *["sh", "json"] * len(ASKED)]


@pytest.mark.parametrize(("command", "answer"), ASKED, ids=[command.split()[-1] for command, _ in ASKED])
def test_answers(server: Serving, folder: Path, command: str, answer: str) -> None:
    done = subprocess.run(
        command.replace("curl localhost:8000", f"curl --silent --show-error {server.http}"),
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads(answer)
