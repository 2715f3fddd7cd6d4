"""docs/admission.md: its policy is in force, and its commands do what it says."""

from __future__ import annotations

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
    program, verb, repository, flag = shlex.split(PAGE.block("nerite serve"))
    assert (program, verb, repository) == ("nerite", "serve", "models")
    with serving(folder / "models", folder / "log", flag.replace("policy.toml", f"{folder}/policy.toml")) as running:
        yield running


def test_the_commands(server: Serving, tmp_path: Path) -> None:
    require("curl")
    commands = PAGE.block("a-key-of-acme")
    printed = run(commands.replace("nerite quota", "nerite quota --url localhost:8000"), server)
    assert '"data":[1.0,2.0]' in printed
    (row,) = [line.split("|") for line in printed.splitlines() if " identity " in line]
    assert [cell.strip() for cell in row[1:8]] == ["identity", "acme", "interactive", "1", "1", "0", "8 bytes"]
    quota = PAGE.block("nerite quota acme").replace("nerite quota", "nerite quota --url localhost:8000")
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
