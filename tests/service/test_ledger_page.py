"""docs/ledger.md: its commands bill what its server has recorded, at its prices."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nerite.cluster.cluster_file import parse_cluster
from nerite.ledger import ledger, tables
from nerite.ledger.prices import parse_prices
from nerite.ledger.row import Ending, Origin, Source
from pages import ROOT, Page, rows, run
from serving import IDENTITY, python_model, serving
from tools import require

PAGE = Page("docs/ledger.md")
POLICY = '[tenants.acme]\nkeys = ["a-key-of-acme"]\n'


def test_the_page(tmp_path: Path) -> None:
    require("curl")
    python_model(tmp_path / "models", "identity", IDENTITY)
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "prices.toml").write_text(PAGE.block("kv-block-bytes"))
    program, verb, repository, *flags = shlex.split(PAGE.block("--ledger=ledger.db"))
    assert (program, verb, repository) == ("nerite", "serve", "models")
    flags = [re.sub(r"=(?=\w+\.)", f"={tmp_path}/", flag) for flag in flags]
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        server.ask(
            "POST",
            "/v2/models/identity/infer",
            {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]},
            authorization="Bearer a-key-of-acme",
        )
        usage = run(PAGE.block("curl").replace("start=2026-11-01&", ""), server)
        assert '"model":"identity"' in usage
        assert '"ending":"answered"' in usage
        printed = run(PAGE.block("--tenant acme"), server, tmp_path)
    (bill,) = [line for line in printed.splitlines() if " acme " in line]
    assert [cell.strip() for cell in bill.split("|")][2:4] == ["identity", "1"]
    assert " all " in printed
    run(PAGE.block("--output focus.csv"), None, tmp_path)
    assert "identity" in (tmp_path / "focus.csv").read_text()


def test_every_name_is_on_the_page() -> None:
    text = (ROOT / "docs" / "ledger.md").read_text()
    for name in (*tables.GROUPS, *Ending, *Origin, *Source):
        assert f"`{name}`" in text, name
    described = {name.strip("`") for cell in rows("docs/ledger.md", "column") for name in cell.split(", ")}
    schema = " ".join(each for each in tables.LedgerSchema().migrations if "TABLE ledger_rows" in each)
    assert described == set(re.findall(r"(\w+) (?:BIGINT|TEXT|DOUBLE)", schema))
    assert f"more than {ledger.MAX_ROWS:,} wait" in text


def test_the_settings_of_a_router_are_valid() -> None:
    text = PAGE.block("member-key-file") + '[[pool]]\nname = "main"\nmembers = ["h:1"]\n'
    assert parse_cluster(text).router.member_key_file == "router.key"
    *command, key = PAGE.block("--router-key-file").split()
    assert command[:2] == ["nerite", "serve"]
    assert key == "--router-key-file=router.key"


def test_the_prices_are_valid() -> None:
    prices = parse_prices(PAGE.block("kv-block-bytes"), "docs/ledger.md")
    assert (prices.currency, len(prices.prices)) == ("EUR", 3)
