"""docs/kubernetes.md: its commands are run, its files read, against a stand-in of a cluster.

Images are built and served from by ``make exam-image``, with the same commands.
"""

from __future__ import annotations

import http.client
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from kubernetes_cluster import Cluster, cluster
from kubernetes_tools import CHART, mistakes, rendered, run
from nerite.cluster.cluster_file import parse_cluster
from pages import ROOT, Page, rows
from pages import run as run_command
from serving import PATIENCE, eventually

PAGE = Page("docs/kubernetes.md")


def commands(part: str) -> Iterator[list[str]]:
    """Yield the commands of a block."""
    for line in PAGE.block(part).replace("\\\n", " ").splitlines():
        yield shlex.split(line.removesuffix("&"))


def run_as_shown(words: list[str], running: Cluster, folder: Path) -> str:
    """Run helm or kubectl; what goes to a forwarded port goes to a pod of its service."""
    if words[0] == "curl":
        (path,) = [word.removeprefix("localhost:8000") for word in words if word.startswith("localhost:8000")]
        address = running.addresses("nerite-router")[0]
        with closing(http.client.HTTPConnection(address, 8000, timeout=PATIENCE)) as connection:
            connection.request("POST", path, words[words.index("-d") + 1])
            return connection.getresponse().read().decode()
    if words[0] not in ("helm", "kubectl") or "port-forward" in words:
        return ""
    found = [word.replace("deploy/helm/nerite", str(CHART)) for word in words[1:]]
    return run(words[0], *found, home=folder, KUBECONFIG=str(folder / "kubeconfig.json"))


@pytest.mark.timeout(400)
def test_from_nothing_to_a_served_model_and_back(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "sources" / "babble", tmp_path / "models" / "babble")
    first, later = list(commands("helm install")), list(commands("helm upgrade"))
    assert len(first) < 10
    with cluster(tmp_path, "models") as running:
        for words in first:
            told = run_as_shown(words, running, tmp_path)
            if "rollout" in words:
                assert "successfully rolled out" in told
                eventually(lambda: running.addresses("nerite-router") != [])
        assert told.count('"text"') == 20
        assert len(running.pods) == 3
        for words in later:
            run_as_shown([*words, *(["--timeout", "120s"] if "--wait" in words else [])], running, tmp_path)
        eventually(lambda: not running.pods)


def test_the_cluster_file_of_the_page() -> None:
    (pool,) = parse_cluster(PAGE.block("for nerite route")).pools
    assert str(pool.source.kubernetes) == "models/nerite:http"


def test_the_values_of_the_page(tmp_path: Path) -> None:
    manifests = rendered(values=yaml.safe_load(PAGE.block("by: router")), folder=tmp_path)
    (config,) = [each for each in manifests if each["kind"] == "ConfigMap"]
    (pool,) = parse_cluster(config["data"]["cluster.toml"]).pools
    assert str(pool.scale_target) == "models/deployment/r-nerite-interactive"
    (rule,) = [
        rule for each in manifests if each["kind"] == "Role" for rule in each["rules"] if rule["apiGroups"] == ["apps"]
    ]
    assert rule["resourceNames"] == ["r-nerite-interactive"]


def test_an_engine_over_several_nodes(tmp_path: Path) -> None:
    manifests = rendered(values=yaml.safe_load(PAGE.block("workload: LeaderWorkerSet")), folder=tmp_path)
    assert [told for each in manifests for told in mistakes(each, "1.37")] == []
    (group,) = [each["spec"] for each in manifests if each["kind"] == "LeaderWorkerSet"]
    (worker,) = group["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert worker["command"][:2] == ["vllm", "serve"]
    assert f"--nnodes={group['leaderWorkerTemplate']['size']}" in worker["command"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_the_targets_of_an_autoscaler(tmp_path: Path) -> None:
    values = yaml.safe_load(PAGE.block("tokensPerSecond: 1500"))
    (scaler,) = [each for each in rendered(values=values, folder=tmp_path) if each["kind"] == "HorizontalPodAutoscaler"]
    metrics = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]]
    assert metrics == ["generated_tokens_per_second", "kv_cache_usage"]
    chart = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["autoscaling"]["targets"].keys() == rows("docs/kubernetes.md", "`autoscaling.targets`").keys()


def test_the_values_that_it_names_are_there() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    named = {
        name for line in re.findall(r"^\| `[^|]*\|", text, re.MULTILINE) for name in re.findall(r"`([\w.*]+)`", line)
    }
    known = {name.partition(".")[0] for name in named} - {"hpa", "keda"}
    known -= set(values["autoscaling"]["targets"])
    assert len(known) > 8 and known <= set(values)


def test_a_cluster_file_is_rendered_as_shown(tmp_path: Path) -> None:
    plan, render = PAGE.block("nerite kubernetes render").splitlines()
    assert "R-nerite-interactive" in run_command(plan)
    values = yaml.safe_load(run_command(render.partition(">")[0]))
    assert [pool["name"] for pool in values["pools"]] == ["interactive", "batch"]
