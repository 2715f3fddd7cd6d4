"""docs/frameworks.md says what the code says. Its parameters are tried in tests/service/test_all_frameworks.py."""

from __future__ import annotations

import re

import pytest

from nerite.backends import registry
from nerite.config.defaults import FRAMEWORKS, Gpus, normalise_instances
from nerite.config.model_config import ModelConfig
from nerite.tools.add.command import command_parser
from pages import ROOT, Page, rows

TABLE = rows("docs/frameworks.md", "`backend`")
BACKENDS = sorted(registry.ENTRIES)


def test_each_backend_is_in_both_tables() -> None:
    assert sorted(TABLE) == BACKENDS
    assert {len(cells) for cells in TABLE.values()} == {11}


@pytest.mark.parametrize("name", BACKENDS)
def test_what_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, entry = TABLE[name], registry.ENTRIES[name]
    files = {each.filename for each in FRAMEWORKS if each.backend == name}
    assert set(re.findall(r"`([^`]+)`", said["files in the version directory"])) == files
    assert said["install"] == (f"`nerite[{entry.extra}]`" if entry.extra else "")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_ins" / "tensorrt"))
    isolated = registry.backend(name).isolated
    assert said["runs in"].partition(";")[0] == ("a worker process each" if isolated else "threads of the server")
    (group,) = normalise_instances(ModelConfig(name="m", backend=name), Gpus()).instance_group
    assert said["default instances on a CPU"] == ("none" if name == "tensorrt" else str(group.count))


def test_the_commands_are_as_nerite_add_takes_them() -> None:
    ((_, block),) = Page("docs/frameworks.md").blocks
    for line in block.strip().splitlines():
        program, verb, *arguments = line.split()
        assert (program, verb) == ("nerite", "add")
        command_parser().parse_args(arguments)
