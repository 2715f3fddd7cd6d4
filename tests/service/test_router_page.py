"""docs/router.md is run: its cluster file and its commands; its tables have every key and every metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nerite.balancing.model_placement import PlacementPolicy
from nerite.cluster.cluster_file import parse_cluster, read_cluster
from nerite.cluster.settings import RouterSettings
from nerite.core.errors import InvalidArgument
from nerite.router import metrics
from pages import ROOT, Page, rows, run
from routing import pool, routing, stand_ins
from tools import require

PAGE = Page("docs/router.md")
TEXT = (ROOT / "docs" / "router.md").read_text()
SCALING = '[pool.scaling]\nmax = 2\nlatency = "1s"\n'


def test_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(PAGE.block("# cluster.toml"))
    (tmp_path / "batch-members.txt").write_text("10.0.0.3:8000\n")
    check, route = PAGE.block("nerite route --check").splitlines()
    assert route == check.replace(" --check", "")
    said = run(check, cwd=tmp_path)
    assert said.splitlines() == [
        "pool interactive: nerite, 2 members, least-work",
        "pool batch: nerite, members in batch-members.txt, least-work",
        "cluster.toml is valid",
    ]


def test_the_metrics(tmp_path: Path) -> None:
    require("curl")
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address) + SCALING) as router:
        assert router.ask("POST", "/v2/models/m/infer", b"{}")[0] == 200
        assert router.ask("POST", "/v2/models/n/infer", b"{}")[0] == 404
        said = run(PAGE.block("curl").replace("localhost:8002", f"localhost:{router.ports['Metrics']}"))
        served = {re.sub(r"_(bucket|sum|count)$", "", line.partition("{")[0].split()[0]) for line in said.splitlines()}
        listed = rows("docs/router.md", "metric")
        assert {*listed} - served == {
            "nerite_router_retries_total",
            "nerite_router_held_total",
            "nerite_router_model_copies",
            "nerite_router_model_copies_wanted",
            "nerite_router_orders_total",
        }
        assert served <= {*listed}
    tables = [metrics.ROUTER, metrics.POOLS, metrics.SCALED, metrics.MEMBERS, metrics.COPIES, metrics.ORDERS]
    tables.append(metrics.ANSWERS)
    declared = {
        metric.name: (metric.kind, {*table.labels, metric.label} - {""}) for table in tables for metric in table.metrics
    }
    assert declared == {
        name: (cells["type"], {*re.findall(r"`(\w+)`", cells["labels"])}) for name, cells in listed.items()
    }


def test_the_placement_file(tmp_path: Path) -> None:
    file = tmp_path / "placement.toml"
    file.write_text(PAGE.block("# placement.toml"))
    (pool,) = read_cluster(str(file)).pools
    assert pool.placement is not None
    assert pool.placement.models["resnet"].most == 2
    assert pool.placement.key == f"X-Admin-Key=@{tmp_path}/keys/admin"


def keys(table: str) -> set[str]:
    """Return the keys in the first column of the table with this heading."""
    lines = TEXT[TEXT.index(f"| `{table}` |") :].partition("\n\n")[0].splitlines()[2:]
    return {key for line in lines for key in re.findall(r"`([a-z-]+)`", line.split("|")[1])}


def test_the_tables_have_every_key() -> None:
    settings = {name.replace("_", "-") for name in RouterSettings.__dataclass_fields__}
    assert keys("[router]") == settings
    for key in sorted(keys("[[pool]]") - {"members", "members-file", "dns", "models", "replicas", "name"}):
        text = f'[[pool]]\nname = "a"\nmembers = ["h:1"]\n{key} = []\n'
        try:
            parse_cluster(text)
        except Exception as error:
            assert "is not known" not in str(error), key
    for key in sorted(keys("[pool.placement]")):
        text = f'[[pool]]\nname = "a"\nmembers = ["h:1"]\n[pool.placement]\n{key} = []\n'
        with pytest.raises(InvalidArgument) as caught:
            parse_cluster(text)
        assert "is not known. " not in caught.value.message, key
    fields = {"memory", "least", "most", "models", "key"}
    policy = {name.replace("_", "-") for name in PlacementPolicy.__dataclass_fields__}
    renamed = {"patience": "load-timeout", "unknown-bytes": "model-memory"}
    assert keys("[pool.placement]") == fields | {renamed.get(name, name) for name in policy}
