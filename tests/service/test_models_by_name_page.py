"""docs/models-by-name.md is run: each of its blocks, with a stand-in for the hub that has a tiny model of that name."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_stand_in import HubStandIn, hub_stand_in
from llm_models import TEMPLATE, language_model
from pages import Page, run
from serving import serving

PAGE = Page("docs/models-by-name.md")
MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with hub_stand_in() as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    language_model(folder / "files", context=1000)
    (folder / "files" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    hub.publish(MODEL, folder / "files")
    with zipfile.ZipFile(folder / "doubler.mar", "w") as archive:
        manifest = {"runtime": "python", "model": {"modelName": "doubler", "handler": "own.py"}}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr(
            "own.py", "def handle(data, context):\n    return data and [each['body'] * 2 for each in data]\n"
        )
    return folder


@pytest.fixture(autouse=True)
def _environment(hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hub.environment(folder / "home").items():
        monkeypatch.setenv(name, value)


def blurred(line: str) -> str:
    """Return a line without its figures and hashes, and without the rate, which what takes no second has not."""
    return re.sub(r"[0-9a-f]{40}|[\d.,]+ ?(?:[kMG]B|bytes|s\b)?", "", line).removesuffix(" a second").strip()


def test_every_block_is_tested_here() -> None:
    known = (
        "serve Qwen/Qwen3-0.6B\n",
        "curl",
        "nerite: hf",
        "--name chat",
        "downloads ls",
        "--offline",
        "gguf",
        ".mar",
    )
    assert len(PAGE.blocks) == len(known)
    for part in known:
        PAGE.block(part)


def test_served_listed_and_removed(hub: HubStandIn, folder: Path) -> None:
    with serving(PAGE.block("serve Qwen/Qwen3-0.6B\n").split()[2], folder / "log") as server:
        answer = json.loads(run(PAGE.block("curl").strip(), server))
        assert answer["choices"][0]["message"]["content"]
        printed = [blurred(line) for line in PAGE.block("nerite: hf").splitlines()]
        said = [blurred(line) for line in server.text.splitlines() if line.startswith("nerite: ")]
        assert printed == said
        assert server.ready("Qwen3-0.6B")
    hub.reads.clear()
    with serving(MODEL, folder / "again", PAGE.block("--offline").split()[-1]) as server:
        assert server.ready("Qwen3-0.6B")
    run(PAGE.block("--name chat").strip(), cwd=folder)
    config = (folder / "models" / "chat" / "config.pbtxt").read_text()
    assert f"from hf:{MODEL}@{hub.models[MODEL]['main'].commit}" in config
    assert hub.downloads == []
    listed, pruned, removed = (run(line, cwd=folder) for line in PAGE.block("downloads ls").strip().splitlines())
    assert MODEL in listed
    assert pruned == "Nothing to remove.\n"
    assert removed.startswith(f"removed hf:{MODEL}: ")


def test_files(folder: Path) -> None:
    # It is served in test_models_by_name.py.
    assert PAGE.block("gguf").split() == ["nerite", "serve", "tiny.gguf"]
    added = run(PAGE.block(".mar").strip(), cwd=folder)
    assert "TorchServe archive" in added
    assert "input   body (BYTES [-1, 1])" in added
