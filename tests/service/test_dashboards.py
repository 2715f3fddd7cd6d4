"""The dashboards and alerts of deploy/: Prometheus itself reads a server, and answers every query there is."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import ROOT
from prometheus_server import RULES, Prometheus, prometheus_server
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving
from tools import require

DEPLOY = ROOT / "deploy"
ELSEWHERE = (
    "vllm:", "nerite_llm_", "nerite_admission_", "nerite_rollout_", "nerite_router_", "nerite_route_cpu_", "nv_gpu_",
    "nv_energy_",
)  # fmt: skip
"""What only a router has, or a server with a language model, a policy, a rollout or a GPU."""
UNITS = {"short", "ops", "reqps", "s", "bytes", "percentunit", "watt"}
"""Of those that Grafana has, by their ids."""
_METRIC = re.compile(r"\b(?:nv|nerite)_\w+|vllm:\w+")


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))}


def panels() -> list[tuple[str, str]]:
    """Return every query of every panel, as Grafana would send it."""
    found = []
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "30s")
                found.append((f"{name}: {panel['title']}", re.sub(r"\$(model|instance|pool)\b", ".*", query)))
    return found


def alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def documented() -> set[str]:
    texts = [(ROOT / "docs" / name).read_text() for name in ("metrics.md", "router.md")]
    return {name for text in texts for name in re.findall(r"^\| `([\w:]+)` \|", text, re.M)}


def test_the_dashboards_are_up_to_date() -> None:
    build = runpy.run_path(str(ROOT / "tools" / "build_dashboards.py"))
    written = {path.stem: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")}
    assert written == {name: build["text"](name) for name in build["DASHBOARDS"]}, "run tools/build_dashboards.py"


@pytest.mark.parametrize("name", dashboards())
def test_the_form_is_one_that_grafana_knows(name: str) -> None:
    board = dashboards()[name]
    assert (board["schemaVersion"], board["uid"]) == (39, f"nerite-{name}")
    variables = {each["name"]: each for each in board["templating"]["list"]}
    source = {"type": "prometheus", "uid": "${source}"}
    assert (variables["source"]["type"], variables["source"]["query"]) == ("datasource", "prometheus")
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["title"] and panel["type"] in {"timeseries", "heatmap"}
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert all(0 <= x < 24 for x, _ in cells) and not cells & taken, panel["title"]
        taken |= cells
        # Others Grafana would print behind the number, as they are.
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert [target["refId"] for target in panel["targets"]] == [*"ABCDEFGH"[: len(panel["targets"])]]
        for target in panel["targets"]:
            assert panel["datasource"] == target["datasource"] == source
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}
            kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert not kept or any(label in each.split(", ") for each in kept), (panel["title"], label)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 0


def test_every_metric_that_they_name_is_documented() -> None:
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name) if name not in documented() else name
        for _, query in [*panels(), *alerts()]
        for name in _METRIC.findall(query)
    }
    assert len(named) > 30
    assert named - documented() == set()


def test_each_alert_fires_when_it_is_to_and_only_then() -> None:
    require("promtool", "prometheus")
    for command in (["check", "rules", RULES.name], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=RULES.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout
    tested = set(re.findall(r"alertname: (\w+)", (RULES.parent / "alerts.test.yml").read_text()))
    assert tested == {name for name, _ in alerts()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    cached = "dynamic_batching {} response_cache { enable: true }"
    python_model(models, "cached", IDENTITY, pbtxt(batch=8, more=cached))
    python_model(models, "identity", IDENTITY, pbtxt(batch=8, more="dynamic_batching {}"))
    with serving(models, tmp_path / "log", "--cache-config=local,size=1048576") as running:
        yield running


@pytest.fixture
def prometheus(server: Serving, tmp_path: Path) -> Iterator[Prometheus]:
    with prometheus_server(tmp_path, [f"127.0.0.1:{server.ports['Metrics']}"], RULES) as running:
        yield running


def test_every_panel_and_every_rule_is_answered(server: Serving, prometheus: Prometheus) -> None:
    before = prometheus.scrapes
    asked = 0
    while prometheus.scrapes < before + 3 or asked < 50:
        server.infer("identity", [float(asked)])
        server.infer("cached", [float(asked % 7)])
        asked += 1
        time.sleep(0.02)  # a load of some seconds, not a wait
    there = {name for name in prometheus.ask("label/__name__/values") if _METRIC.fullmatch(name)}
    for title, query in panels():
        result = prometheus.samples(query)
        if not any(name.startswith(ELSEWHERE) for name in _METRIC.findall(query)):
            assert set(_METRIC.findall(query)) <= there, title
            assert result, f"{title} shows nothing: {query}"
    for name, query in alerts():
        assert prometheus.samples(query) == [], f"{name} would fire"
    eventually(
        lambda: all(rule["health"] == "ok" for group in prometheus.ask("rules")["groups"] for rule in group["rules"])
    )
    types = {name: told[0]["type"] for name, told in prometheus.ask("metadata").items() if _METRIC.fullmatch(name)}
    table = dict(re.findall(r"^\| `([\w:]+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    assert types.items() <= table.items()
    assert len(types) > 30


def test_the_panels_of_a_rollout_compare_both_versions(server: Serving, prometheus: Prometheus, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY, pbtxt(batch=8, more="dynamic_batching {}"), version=2)
    spec = {"to": 2, "steps": [50, 100], "hold": "1h", "gate": ["errors"]}
    assert server.ask("POST", "/v2/models/identity/rollout", spec)[0] == 200
    queries = [(title, query) for title, query in panels() if "Rollout: " in title and "vllm:" not in query]
    assert len(queries) >= 7

    def missing() -> list[str]:
        for number in range(20):
            server.infer("identity", [float(number)])
        return [title for title, query in queries if not prometheus.samples(query)]

    eventually(lambda: not missing())
    (query,) = [query for title, query in queries if title.endswith("Rollout: latency")]
    eventually(lambda: not missing() and len(prometheus.samples(query)) == 2)
    compared = {(each["metric"]["arm"], each["metric"]["version"]) for each in prometheus.samples(query)}
    assert compared == {("baseline", "1"), ("candidate", "2")}
