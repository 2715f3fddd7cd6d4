"""The dashboards and alerts of deploy/: Prometheus itself reads a server, and answers every query there is."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ports import free_ports
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving
from tools import require

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
ELSEWHERE = ("vllm:", "nerite_llm_", "nerite_admission_", "nerite_rollout_", "nv_gpu_", "nv_energy_")
"""What only servers with a language model, a policy, a rollout or a GPU have: docs/metrics.md says which there are."""
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
                found.append((f"{name}: {panel['title']}", re.sub(r"\$(model|instance)\b", ".*", query)))
    return found


def alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def documented() -> set[str]:
    return set(re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))


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


class Prometheus:
    """One that runs, and reads a server every second."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, what: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def samples(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found

    @property
    def scrapes(self) -> float:
        """How often it has read the server."""
        try:
            found = self.samples('count_over_time(up{job="nerite"}[5m]) * on() up{job="nerite"}')
        except OSError:
            return 0
        return float(found[0]["value"][1]) if found else 0


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
    require("promtool", "prometheus")
    (port,) = free_ports(1)
    target = f"127.0.0.1:{server.ports['Metrics']}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "nerite", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        running = Prometheus(port)
        eventually(lambda: running.scrapes >= 1)
        yield running
    finally:
        process.terminate()
        process.wait(30)


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
