"""docs/gpus.md and docs/doctor.md say of builds for GPUs what the table in the code says."""

from __future__ import annotations

import re

import pytest

from nerite.backends.gpu_builds import FRAMEWORKS, GpuFramework
from pages import Page, rows

TABLE = rows("docs/gpus.md", "module")


def test_each_framework_is_in_the_table() -> None:
    assert list(TABLE) == [framework.module for framework in FRAMEWORKS]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.module)
def test_what_pip_installs(framework: GpuFramework) -> None:
    newer, older = list(TABLE[framework.module].values())[-2:]
    packages = {cuda: [each.arguments for each in framework.packages if each.cuda == cuda] for cuda in (12, 13)}
    assert re.findall(r"`([^`]+)`", older) == packages[12]
    assert re.findall(r"`([^`]+)`", newer) == (packages[13] or packages[12])


@pytest.mark.parametrize(("page", "block"), [("docs/gpus.md", "is a CPU build"), ("docs/doctor.md", "warning  torch")])
def test_the_commands_on_the_pages(page: str, block: str) -> None:
    said = " ".join(Page(page).block(block).split())
    known = {each.arguments for framework in FRAMEWORKS for each in framework.packages}
    commands = re.findall(r"&& pip install (\S+(?: --index-url \S+)?)", said)
    assert commands
    assert set(commands) <= known
