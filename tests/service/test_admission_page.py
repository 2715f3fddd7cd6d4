"""docs/admission.md: its policy is in force, and its commands do what it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.admission import shared_quotas, tenants
from nerite.transports import access
from pages import ROOT, Page, run
from serving import IDENTITY, Serving, python_model, serving
from tools import require

PAGE = Page("docs/admission.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    python_model(folder / "models", "identity", IDENTITY)
    (folder / "policy.toml").write_text(PAGE.block("[tenants.acme]"))
    (folder / "admin.keys").write_text("KEY\n")
    # The first command with a flag more: nothing else differs.
    first, second = (shlex.split(each) for each in re.findall("^nerite serve .*$", PAGE.text, re.MULTILINE))
    assert first == second[:-1]
    program, verb, repository, *flags = second
    assert (program, verb, repository) == ("nerite", "serve", "models")
    here = [re.sub(r"policy\.toml|admin\.keys", lambda found: f"{folder}/{found[0]}", flag) for flag in flags]
    with serving(folder / "models", folder / "log", *here) as running:
        yield running


def test_the_commands(server: Serving, tmp_path: Path) -> None:
    require("curl")
    commands = PAGE.block("a-key-of-acme")
    printed = run(commands.replace("nerite quota", "nerite quota --url localhost:8000"), server)
    assert '"data":[1.0,2.0]' in printed
    (row,) = [line.split("|") for line in printed.splitlines() if " identity " in line]
    assert [cell.strip() for cell in row[1:8]] == ["identity", "acme", "interactive", "1", "1", "0", "8 bytes"]
    quota = re.sub("^nerite serve.*$", "", PAGE.block("--csv > use.csv"), flags=re.MULTILINE)
    quota = quota.replace("nerite quota", "nerite quota --url localhost:8000")
    assert "200000" in run(quota, server, tmp_path)
    assert (tmp_path / "use.csv").read_text().splitlines()[1].startswith("identity,acme,interactive,1,1,")


def test_every_name_is_on_the_page() -> None:
    text = (ROOT / "docs" / "admission.md").read_text()
    tables = (
        tenants.USE, tenants.LOADS, tenants.TENANTS, tenants.RATES, shared_quotas.REDIS, shared_quotas.LEASES
    )  # fmt: skip
    names = [metric.name.removeprefix("nerite_admission_") for table in tables for metric in table.metrics]
    for name in (*names, shared_quotas.PASSWORD, access.CLASS, *access.TIMEOUTS, *access.KEYS, *access.RETRIES):
        assert f"`{name}" in text, name
