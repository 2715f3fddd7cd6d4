"""What docs/ray.md shows beside commands, which ``make exam-ray`` runs: cluster files, and their keys."""

from __future__ import annotations

import pytest

from nerite.cluster.cluster_file import parse_cluster
from nerite.core.errors import InvalidArgument
from nerite.ray.plan import ray_plan
from pages import Page, rows

PAGE = Page("docs/ray.md")


def test_resources() -> None:
    plan = ray_plan(parse_cluster(PAGE.block("gpus = 2")), "c")
    assert plan.pools[0].bundle == {"CPU": 1, "GPU": 2, "memory": 64 << 30, "accelerator_type:H100": 0.001}


def test_an_engine_that_places_gpus() -> None:
    plan = ray_plan(parse_cluster('[[pool]]\nname = "a"\nmodels = "m"\n' + PAGE.block("engine-places-gpus = ")), "c")
    assert plan.pools[0].engine_places_gpus and "GPU" not in plan.pools[0].bundle


def test_a_router_elsewhere() -> None:
    (pool,) = parse_cluster(PAGE.block("ray = ")).pools
    assert pool.source.ray == "cluster/interactive"


def test_every_key_is_on_the_page() -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_cluster('[[pool]]\nname = "a"\nmodels = "m"\nresources = { zzzzzz = 1 }')
    told = refused.value.message.partition("There are: ")[2].rstrip(".").split(", ")
    assert {*told, "custom"} == set(rows("docs/ray.md", "key"))
