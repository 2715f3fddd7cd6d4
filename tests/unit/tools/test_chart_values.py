"""A cluster file as values of the Helm chart."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml

from nerite.cluster.cluster_file import parse_cluster
from nerite.core.errors import InvalidArgument
from nerite.tools.kubernetes.chart_values import PodOptions, chart_values, toml_of, yaml_of

CLUSTER = """
[router]
http-port = 9000
exit-timeout = "45s"
timeout = "30s"
policy-file = "policy.toml"

[[pool]]
name = "interactive"
models = "../models"
replicas = 2
flags = ["--log-verbose=1"]
borrows = true

[pool.ejection]
consecutive-failures = 3

[[pool]]
name = "batch"
models = "s3://bucket/models"
classes = ["batch"]

[pool.scaling]
min = 0
max = 8
warm = 1
rate = 100

[[pool]]
name = "elsewhere"
kind = "vllm"
members = [{ http = "10.0.0.1:8000", capacity = 2.0 }]
"""
CLAIMS = PodOptions("registry.example.org/nerite", {"": "models"}, {"interactive": 1})


def values_of(text: str, options: PodOptions = CLAIMS, policy: str = "") -> dict[str, Any]:
    return chart_values(parse_cluster(text), tomllib.loads(text), policy, options)


def test_the_whole_file() -> None:
    values = values_of(CLUSTER, policy="[tenants.a]\n")
    first, second = values["pools"]
    assert values["image"] == {"imageName": "registry.example.org/nerite"}
    assert tomllib.loads(first.pop("toml")) == {"borrows": True, "ejection": {"consecutive-failures": 3}}
    assert first == {
        "name": "interactive",
        "replicaCount": 2,
        "repository": "/models",
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
        "serverArgs": ["--log-verbose=1"],
        "numGpus": 1,
    }
    assert second["repository"] == "s3://bucket/models"
    assert second["autoscaling"] == {"enabled": True, "by": "keda", "minReplicas": 0, "maxReplicas": 8}
    assert tomllib.loads(second["toml"]) == {"classes": ["batch"], "scaling": {"min": 0, "max": 8, "rate": 100}}
    router = values["router"]
    assert (router["exitSeconds"], router["replicaCount"]) == (45, 1)
    assert tomllib.loads(router["toml"]) == {"timeout": "30s"}
    assert router["policy"] == "[tenants.a]\n"
    assert tomllib.loads(router["otherPools"])["pool"] == [
        {"name": "elsewhere", "kind": "vllm", "members": [{"http": "10.0.0.1:8000", "capacity": 2.0}]}
    ]


def test_the_router_scales_if_it_is_to() -> None:
    pool = values_of(CLUSTER, CLAIMS._replace(scaled_by="router"))["pools"][1]
    assert pool["autoscaling"]["by"] == "router"
    assert tomllib.loads(pool["toml"])["scaling"]["actuator"] == "kubernetes"


RESOURCES = '[[pool]]\nname = "a"\nmodels = "s3://b/m"\n[pool.resources]\n'


@pytest.mark.parametrize(
    ("text", "gpus", "made"),
    [
        ("cpus = 0.5", {}, {"resources": {"requests": {"cpu": "0.5"}}}),
        ("gpus = 2", {}, {"numGpus": 2, "resources": {"requests": {"cpu": "1"}}}),
        ("gpus = 0.5", {"a": 1}, {"numGpus": 1, "resources": {"requests": {"cpu": "1"}}}),
        ("gpus = 2", {"": 0}, {"resources": {"requests": {"cpu": "1"}}}),
        ("engine-places-gpus = true", {"": 8}, {"numGpus": 8, "resources": {"requests": {"cpu": "1"}}}),
        (
            'memory = "1GiB"',
            {},
            {"resources": {"requests": {"cpu": "1", "memory": "1073741824"}, "limits": {"memory": "1073741824"}}},
        ),
    ],
)
def test_resources(text: str, gpus: dict[str, int], made: dict[str, Any]) -> None:
    (pool,) = values_of(RESOURCES + text, PodOptions(gpus=gpus))["pools"]
    assert pool == {"name": "a", "replicaCount": 1, "repository": "s3://b/m", "toml": "", **made}


MODELS = '[[pool]]\nname = "a"\nmodels = "models"\n'


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (MODELS, PodOptions(), "copy them into a volume and name its claim, as in --claim a=CLAIM"),
        (MODELS, PodOptions(claims={"b": "x"}), "there is no pool 'b' with models, but a"),
        (MODELS.replace('"a"', '"Big_One"'), CLAIMS._replace(gpus={}), "pool 'Big_One' has a name that Kubernetes"),
        ('[[pool]]\nname = "a"\nmembers = ["h:1"]\n', PodOptions(), "no pool has models"),
        (MODELS + '[[pool]]\nname = "b"\nmembers-file = "f"\n', PodOptions(claims={"": "c"}), "has a members file"),
        ('[router]\nledger = "a.db"\n' + MODELS, PodOptions(claims={"": "c"}), "router.ledger is a file"),
        ('[router]\nredis = "redis://localhost"\n' + MODELS, PodOptions(claims={"": "c"}), "name the Redis of the"),
        (
            '[router]\nbatches = "postgresql://h/d"\nbatch-files = "/b"\n' + MODELS,
            PodOptions(claims={"": "c"}),
            "router.batch-files names files, which pods of routers do not have: remove batches and batch-files",
        ),
        (
            MODELS + '[[pool]]\nname = "b"\nmembers = ["h:1"]\ntls = { ca = "ca.pem" }\n',
            PodOptions(claims={"": "c"}),
            "tls of pool 'b' names files",
        ),
        (
            MODELS + '[pool.placement]\nmemory = "1GiB"\nkey = "k=@file"\n',
            PodOptions(claims={"": "c"}),
            "key in placement of pool 'a' names a file",
        ),
        (RESOURCES + "gpus = 0.5", PodOptions(), "pool 'a' has 0.5 GPUs, and Kubernetes gives whole ones"),
        (RESOURCES + "engine-places-gpus = true", PodOptions(), "which needs Ray: say how many GPUs each server has"),
    ],
)
def test_what_has_no_meaning_in_a_cluster(text: str, options: PodOptions, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        values_of(text, options)
    assert told in caught.value.message


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, 2.5, True, 'x"y'], "c": {}}, "d e": "line\nbreak", "f": []},
        {
            "pools": [{"name": "a", "toml": 'x = 1\n\n  y = "#"\nz = "é"\n'}, {"name": "b"}],
            "text": "a: #\n\n  b\n",
            "empty": {},
            "list": [[1], "z"],
        },
    ],
)
def test_yaml_and_toml_read_as_they_were_written(value: dict[str, Any]) -> None:
    assert tomllib.loads(toml_of(value)) == value
    assert yaml.safe_load(yaml_of(value)) == value


ROLLOUT = """
[[pool]]
name = "main"
models = "s3://bucket/models"
flags = ["--log-verbose=1"]

[pool.rollout.models.resnet]
from = "1"
to = "2"
gate = ["errors"]
"""


def test_a_rollout_is_led_by_the_router_and_servers_begin_with_its_baseline() -> None:
    settings = parse_cluster(ROLLOUT)
    values = chart_values(settings, tomllib.loads(ROLLOUT), "", PodOptions())
    (pool,) = values["pools"]
    assert pool["serverArgs"] == ["--rollout-baseline=resnet=1", "--log-verbose=1"]
    (read,) = parse_cluster(f'[[pool]]\nname = "main"\nkubernetes = "models/main:http"\n{pool["toml"]}').pools
    assert read.rollout == settings.pools[0].rollout
    with_file = ROLLOUT.replace("[pool.rollout.models", '[pool.rollout]\nkey = "x-key=@key"\n[pool.rollout.models')
    with pytest.raises(InvalidArgument, match="key in rollout of pool 'main' names a file"):
        chart_values(parse_cluster(with_file), tomllib.loads(with_file), "", PodOptions())
