"""``nerite kubernetes render``: values that the chart takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from kubernetes_tools import CHART, ROOT, rendered, run
from nerite.cluster.cluster_file import parse_cluster
from serving import NERITE

EXAMPLE = str(ROOT / "examples" / "platform" / "cluster.toml")

REDIS = "redis://redis.models:6379"


def render(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [str(NERITE), "kubernetes", "render", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_the_platform_example_in_kubernetes(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    pods = ("--claim", "models", "--redis", REDIS, "--image", "registry.example.org/nerite:1")
    file.write_text(render(EXAMPLE, *pods))
    text = run("helm", "template", "platform", str(CHART), "-n", "models", "-f", str(file), home=tmp_path)
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}
    interactive = found["Deployment", "platform-nerite-interactive"]["spec"]
    assert interactive["replicas"] == 2
    assert "--load-model=babble" in interactive["template"]["spec"]["containers"][0]["command"]
    data = found["ConfigMap", "platform-nerite-router"]["data"]
    cluster = parse_cluster(data["cluster.toml"])
    assert [str(pool.source.kubernetes) for pool in cluster.pools] == [
        "models/platform-nerite-interactive:http",
        "models/platform-nerite-batch:http",
    ]
    assert cluster.router.redis == REDIS
    assert data["policy.toml"] == (ROOT / "examples" / "platform" / "policy.toml").read_text().rstrip("\n") + "\n"


def test_the_plan_says_what_will_be() -> None:
    assert render(EXAMPLE, "--claim", "models", "--redis", REDIS, "--gpus", "interactive=1", "--plan").splitlines() == [
        "deployment and service R-nerite-router       2 routers",
        "deployment and service R-nerite-interactive  2 servers of the claim models (1 GPUs each)",
        "deployment and service R-nerite-batch        1 servers of the claim models",
    ]


def test_resources_are_those_of_the_pods(tmp_path: Path) -> None:
    """The file of a Ray cluster is one for Kubernetes, too, and its router reads what the chart makes of it."""
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[pool]]\nname = "chat"\nmodels = "s3://bucket/models"\n\n'
        '[pool.resources]\ncpus = 4\ngpus = 2\nmemory = "8GiB"\ncustom = { spot = 1 }\n'
    )
    done = subprocess.run([str(NERITE), "kubernetes", "render", str(file)], capture_output=True, text=True, check=True)
    assert "pool 'chat': spot in resources.custom are of Ray, and have no effect" in done.stderr
    assert render(str(file), "--plan").splitlines()[1].endswith("(4 cpu, 8589934592 memory, 2 GPUs each)")
    (tmp_path / "platform.yaml").write_text(done.stdout)
    manifests = rendered("-f", str(tmp_path / "platform.yaml"), folder=tmp_path)
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    (server,) = found["Deployment", "r-nerite-chat"]["spec"]["template"]["spec"]["containers"]
    assert server["resources"] == {
        "requests": {"cpu": "4", "memory": "8589934592"},
        "limits": {"memory": "8589934592", "nvidia.com/gpu": 2},
    }
    (pool,) = parse_cluster(found["ConfigMap", "r-nerite-router"]["data"]["cluster.toml"]).pools
    assert pool.source.kubernetes is not None and pool.resources is None


def test_a_mistake_is_told() -> None:
    assert "name its claim, as in --claim interactive=CLAIM" in render(EXAMPLE, status=1)
    assert "--gpus must be [POOL=]COUNT" in render(EXAMPLE, "--gpus", "many", status=1)
    assert "--claim is given twice for all pools" in render(EXAMPLE, "--claim", "a", "--claim", "b", status=2)
