"""A Prometheus of the test's own: the Debian package's server, which reads metrics pages and evaluates rules."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pages import ROOT
from ports import free_ports
from serving import eventually
from tools import require

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
_WINDOW = re.compile(r"\[\d+m\]")


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, what: str, **query: str) -> Any:
        """Return the data of an answer of its API."""
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def samples(self, query: str) -> list[Any]:
        """Return what a query finds now."""
        found: list[Any] = self.ask("query", query=query)["result"]
        return found

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of the alerts of this name that fire."""
        found = self.ask("alerts")["alerts"]
        return [each["labels"] for each in found if each["labels"]["alertname"] == alert and each["state"] == "firing"]

    @property
    def scrapes(self) -> float:
        """How often it has read the page that it has read least often."""
        try:
            found = self.samples('min(count_over_time(up{job="nerite"}[5m]) * on (instance) up{job="nerite"})')
        except OSError:
            return 0
        return float(found[0]["value"][1]) if found else 0


@contextmanager
def prometheus_server(
    folder: Path,
    targets: Sequence[str],
    rules: Path | None = None,
    interval: str = "1s",
    port: int = 0,
    labels: Mapping[str, Mapping[str, str]] = {},
) -> Iterator[Prometheus]:
    """Run a Prometheus that reads these ``HOST:PORT`` every ``interval``; ``labels`` are those of a target."""
    require("prometheus")
    port = port or free_ports(1)[0]
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)] if rules else [],
        "scrape_configs": [
            {
                "job_name": "nerite",
                "static_configs": [{"targets": [each], "labels": dict(labels.get(each, {}))} for each in targets],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        running = Prometheus(port)
        eventually(lambda: running.scrapes >= 1, what="Prometheus does not read all targets")
        yield running
    finally:
        process.terminate()
        process.wait(30)


def short_rules(folder: Path, seconds: int = 5) -> Path:
    """Write the rules of ``deploy/`` for tests: their windows have so many seconds, and alerts fire at once."""
    found = yaml.safe_load(RULES.read_text())
    for group in found["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _WINDOW.sub(f"[{seconds}s]", rule["expr"])
            rule.pop("for", None)
    file = folder / "alerts.yml"
    file.write_text(yaml.safe_dump(found))
    return file
