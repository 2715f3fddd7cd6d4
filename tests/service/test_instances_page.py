"""docs/instances.md: its configurations load, and its commands do what stands beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import Page
from serving import IDENTITY, pbtxt, python_model, serving

BLOCKS = Page("docs/instances.md").blocks
CONFIGURATIONS = [text for language, text in BLOCKS if language == "pbtxt"]
COMMANDS = [text.split() for language, text in BLOCKS if language == "sh"]
DEFAULT = "instance_group [{ kind: KIND_CPU }]\n"


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(command[3:]) for command in COMMANDS])
def test_the_commands(tmp_path: Path, command: list[str]) -> None:
    assert command[:3] == ["nerite", "serve", "models"]
    groups, detector, archiver, threads = CONFIGURATIONS
    models = tmp_path / "models"
    for text in (detector, archiver):
        name = text.partition("\n")[0].split("/")[1]
        python_model(models, name, IDENTITY, pbtxt().replace(DEFAULT, text))
    python_model(models, "both", IDENTITY, pbtxt().replace(DEFAULT, groups))
    python_model(
        models, "near", IDENTITY, pbtxt(more=threads).replace(DEFAULT, DEFAULT.replace("}]", 'host_policy: "near" }]'))
    )
    with serving(models, tmp_path / "log", *command[3:]) as server:
        assert sorted(name.rpartition("_")[0] for name in server.workers()) == [
            "archiver_0",
            "both_0",
            "both_0",
            "detector_0",
            "near_0",
            "spare",
        ]
        for model in ("archiver", "detector", "both", "near"):
            assert server.infer(model, [2.0]) == [2.0]
