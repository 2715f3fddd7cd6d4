"""``[pool.scaling]`` of the cluster file: as data, and its mistakes with their lines."""

from __future__ import annotations

import pytest

from nerite.autoscaling.policy import ScalingPolicy
from nerite.cluster.cluster_file import parse_cluster
from nerite.cluster.kubernetes_names import ScaleTarget
from nerite.core.errors import InvalidArgument

POOL = """[[pool]]
name = "main"
models = "models"
"""
SCALING = """
[pool.scaling]
min = 0
max = 4
warm = 1
idle = "10m"
stabilization = "1m"
ttft = "400ms"
itl = "50ms"
latency = "2s"
share = 0.99
headroom = 0.5
step = 3.0
rate = 100.0
concurrency = 8
"""


def test_the_whole_table() -> None:
    (pool,) = parse_cluster(POOL + SCALING).pools
    assert pool.scaling == ScalingPolicy(
        least=0, most=4, warm=1, idle=600.0, stabilization=60.0, ttft=0.4, itl=0.05, latency=2.0, share=0.99,
        headroom=0.5, step=3.0, rate=100.0, concurrency=8.0,
    )  # fmt: skip


def test_without_a_table_the_number_is_left_alone() -> None:
    (pool,) = parse_cluster(POOL).pools
    assert pool.scaling is None


KUBERNETES = """[[pool]]
name = "p"
kubernetes = "models/nerite:http"
scaling = { max = 2, rate = 1, actuator = "kubernetes" %s }
"""


def test_the_workload_is_that_of_the_service_unless_it_is_named() -> None:
    (pool,) = parse_cluster(KUBERNETES % "").pools
    assert pool.scale_target == ScaleTarget("models", "deployment", "nerite")
    (pool,) = parse_cluster(KUBERNETES % ', target = "statefulset/web"').pools
    assert pool.scale_target == ScaleTarget("", "statefulset", "web")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            POOL + "[pool.scaling]\nmax = 2\nrate = 1\ntarget = 'deployment/a'\n",
            "cluster.toml:7: pool.1.scaling.target: has an effect with actuator",
        ),
        (
            POOL + "[pool.scaling]\nmax = 2\nrate = 1\nactuator = 'kubernetes'\n",
            "cluster.toml:7: pool.1.scaling.actuator: has no effect with models",
        ),
        (
            '[[pool]]\nname = "p"\nmembers = ["a:1"]\n[pool.scaling]\nmax = 2\nrate = 1\nactuator = "kubernetes"\n',
            "cluster.toml:4: pool.1.scaling: has no target: name the workload",
        ),
        (KUBERNETES % ', target = "pod/web"', "pool.1.scaling.target: must be KIND/NAME"),
        (POOL + "[pool.scaling]\nlatency = '1s'\n", "cluster.toml:4: pool.1.scaling: has no max"),
        (POOL + "[pool.scaling]\nmax = 2\n", "cluster.toml:4: pool.1.scaling: there is no target"),
        (
            POOL + "[pool.scaling]\nmax = 1\nmin = 2\nrate = 1\n",
            "pool.1.scaling: max is 1, less than min, 2: raise max",
        ),
        (POOL + "[pool.scaling]\nmax = 2\nlatency = 'soon'\n", "cluster.toml:6: pool.1.scaling.latency: must be a dur"),
        (
            POOL + "[pool.scaling]\nmax = 2\nlatancy = 1\n",
            "cluster.toml:6: pool.1.scaling.latancy: is not known. Did you",
        ),
        (POOL + "replicas = 2\n[pool.scaling]\nmax = 2\nrate = 1\n", "cluster.toml:4: pool.1.replicas: has no effect"),
        (
            '[[pool]]\nname = "p"\nmembers = ["a:1"]\n[pool.scaling]\nmax = 2\nrate = 1\nwarm = 1\n',
            "cluster.toml:7: pool.1.scaling.warm: has an effect with models only",
        ),
        (POOL + "scaling = 3\n", "cluster.toml:4: pool.1.scaling: must be a table"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_cluster(text)
    assert complaint in str(caught.value)
