"""What agents need is printed, and written only where nothing is lost and somebody has agreed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from nerite.tools import connect

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "agents.md").read_text()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> int:
    return connect.run(arguments)


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    command, printed = re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    name, *arguments = command.split()[1:]
    assert (name, run(*arguments)) == ("connect", 0)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("agent", ["claude", "codex", "cline", "continue", "open-webui"])
def test_each_agent_is_told_model_and_place(agent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(agent, "--model", "a model", "--url", "gpu-3:8000/v1/", "--key", "secret") == 0
    said = capsys.readouterr()
    assert "a model" in said.out and "http://gpu-3:8000" in said.out and "secret" in said.out + said.err
    assert f"`{agent}`" in PAGE


def test_settings_are_added(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_text('{"model": "x", "env": {"A": "1", "ANTHROPIC_MODEL": "old"}}')
    assert run("claude", "--model", "chat", "--write", "--yes") == 0
    settings = json.loads(file.read_text())
    assert (settings["model"], settings["env"]["A"], settings["env"]["ANTHROPIC_MODEL"]) == ("x", "1", "chat")
    assert file.stat().st_mode & 0o777 == 0o600
    assert run("claude", "--model", "chat", "--write") == 0, "nothing is asked if nothing changes"
    file = home / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text('model = "x"\n[profiles.own]\nmodel = "y"\n')
    assert run("codex", "--model", "chat", "--write", "--yes") == 0
    settings = tomllib.loads(file.read_text())
    assert (settings["model"], settings["profiles"]["nerite"]["model"]) == ("x", "chat")
    assert settings["model_providers"]["nerite"]["wire_api"] == "responses"


@pytest.mark.parametrize(
    ("agent", "file", "content", "says"),
    [
        ("claude", ".claude/settings.json", "{", "are not JSON"),
        ("claude", ".claude/settings.json", '{"env": []}', "are not an object with an object 'env'"),
        ("codex", ".codex/config.toml", "[profiles.nerite]", "have other tables named nerite"),
        ("continue", ".continue/config.yaml", "name: mine", "exists already"),
        ("continue", ".continue/config.yaml", "", "add --yes"),
        ("cline", "", "", "no file to write"),
    ],
)
def test_nothing_is_lost(
    home: Path, agent: str, file: str, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content:
        (home / file).parent.mkdir()
        (home / file).write_text(content)
    assert run(agent, "--model", "chat", "--write", *(["--yes"] if content else [])) == 1
    assert says in capsys.readouterr().err
    if content:
        assert (home / file).read_text() == content
