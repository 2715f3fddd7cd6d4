"""docs/picker.md: its cluster file and its command do what it says, and a real Envoy takes its configuration."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from envoy_proxy import binary, configuration
from nerite.cluster.cluster_file import parse_cluster
from nerite.picker import answers
from nerite.tools.pick import USED
from pages import ROOT, Page
from routing import stand_ins
from serving import NERITE, Serving

NAME = "docs/picker.md"
PAGE = Page(NAME)
TEXT = (ROOT / NAME).read_text()


def test_the_command(tmp_path: Path) -> None:
    with stand_ins(1) as (member,):
        text = PAGE.block("# cluster.toml").replace("10.0.0.1:8000", member.address)
        assert len(parse_cluster(text).pools[0].source.members) == 2
        (tmp_path / "cluster.toml").write_text(text)
        command = shlex.split(PAGE.block("nerite pick"))
        assert command[0] == "nerite"
        ports = {"9002": "0", "9090": "0"}
        log = tmp_path / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [str(NERITE), *(ports.get(each, each) for each in command[1:])],
                cwd=tmp_path, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip
        picker = Serving(process, log)
        try:
            picker.wait()
            assert "among 2 members; 1 are ready" in picker.text
            assert "nerite_route_cpu_seconds_total" in picker.metrics()
        finally:
            assert picker.stop() == 0


def test_the_names_are_those_of_the_protocol() -> None:
    for name in (answers.ENDPOINT, answers.SERVED, answers.SUBSET, answers.NAMESPACE, answers.SUBSET_NAMESPACE):
        assert f"`{name}`" in TEXT or f"`{name}" in TEXT
    (used,) = re.findall(r"Of the table `\[router\]`, a picker uses (.*)\.", TEXT)
    assert set(re.findall(r"`([a-z-]+)`", used)) == set(USED)


def test_envoy_takes_the_configuration(tmp_path: Path) -> None:
    filters, cluster = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL))
    whole = configuration(1, ["10.0.0.1:8000"], "10.0.0.9:9002", filters, cluster)
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(whole))
    checked = subprocess.run(
        [str(binary()), "--mode", "validate", "-c", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
