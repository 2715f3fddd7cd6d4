"""The processes that a cluster file needs on one machine."""

from __future__ import annotations

from itertools import count

import pytest

from nerite.cluster.cluster_file import parse_cluster
from nerite.core.errors import InvalidArgument
from nerite.tools.up.local_plan import (
    LocalProcess,
    awake,
    local_plan,
    member_lines,
    plan_text,
    redis_address,
    rollout_lines,
    server_process,
)

CLUSTER = """
[router]
http-port = 8000
{}
[[pool]]
name = "interactive"
models = "models"
replicas = 2
flags = ["--log-verbose=1"]

[[pool]]
name = "remote"
members = ["10.0.0.1:8000"]
"""
REDIS = 'policy-file = "p"\nredis = "redis://127.0.0.1:7000"'


SCALED = """
[[pool]]
name = "scaled"
models = "models"
{}
[pool.scaling]
min = {}
max = 4
warm = {}
concurrency = 4
"""


def plan(router: str = "", *, redis: str = "", answers: bool = False, text: str = CLUSTER) -> list[LocalProcess]:
    ports = count(9000)
    settings = parse_cluster(text.format(router), "dir/cluster.toml")
    return local_plan(
        settings, lambda: next(ports), "/run/{}".format, nerite="nerite", redis=redis, redis_answers=answers
    )


def test_servers_of_pools_with_models_and_the_router_behind_them() -> None:
    first, second, router = plan()
    assert (first.name, second.name, router.name) == ("interactive/1", "interactive/2", "router")
    assert first.command[:3] == ("nerite", "serve", "dir/models")
    assert {"--http-port=9000", "--grpc-port=9001", "--metrics-port=9002"} < set(first.arguments)
    assert first.arguments[-1] == "--log-verbose=1"
    assert second.address == "127.0.0.1:9003"
    assert router.command == ("nerite", "route", "dir/cluster.toml", "--members", "interactive=/run/interactive")
    assert (router.address, router.ready_path) == ("127.0.0.1:8000", "/v2/health/ready")


def test_members_are_named_as_the_processes() -> None:
    assert member_lines(parse_cluster(CLUSTER.format("")), plan()) == {
        "interactive": [
            "127.0.0.1:9000 grpc=127.0.0.1:9001 metrics=127.0.0.1:9002 name=interactive/1",
            "127.0.0.1:9003 grpc=127.0.0.1:9004 metrics=127.0.0.1:9005 name=interactive/2",
        ]
    }


def test_a_scaled_pool_begins_with_its_least_members_and_the_warm_ones() -> None:
    text = SCALED.format("", 1, 2)
    first, second, third, router = plan(text=text)
    assert [each.name for each in (first, second, third)] == ["scaled/1", "scaled/2", "scaled/3"]
    assert [each.standby for each in (first, second, third)] == [False, True, True]
    assert (second.arguments[-1], second.ready_path) == ("--standby", "/v2/health/live")
    assert awake(second) == server_process(
        parse_cluster(text, "dir/cluster.toml").pools[0], "scaled/2", count(9003).__next__, "nerite"
    )
    assert router.ready_path == "/v2/health/ready"
    lines = member_lines(parse_cluster(text), [first, second, third, router])
    assert lines == {"scaled": ["127.0.0.1:9000 grpc=127.0.0.1:9001 metrics=127.0.0.1:9002 name=scaled/1"]}


def test_a_router_whose_pools_may_be_empty_is_ready_without_members() -> None:
    standby, router = plan(text=SCALED.format("", 0, 1))
    assert standby.standby
    assert router.ready_path == "/v2/health/live"
    (router,) = plan(text=SCALED.format("", 0, 0))
    assert router.name == "router"


def test_scaling_needs_a_metrics_port_that_is_known() -> None:
    with pytest.raises(InvalidArgument, match=r"router\.metrics-port is 0, any free port: choose one"):
        plan(text="[router]\nmetrics-port = 0\n" + SCALED.format("", 1, 0))


def test_redis_is_started_if_it_is_here_and_does_not_run() -> None:
    first, *_ = plan(REDIS, redis="redis-server")
    assert (first.name, first.address, first.ready_path) == ("redis", "127.0.0.1:7000", "")
    assert plan(REDIS, redis="redis-server", answers=True)[0].name == "interactive/1"
    assert plan(REDIS)[0].name == "interactive/1"
    assert plan(REDIS.replace("127.0.0.1", "10.0.0.9"), redis="redis-server")[0].name == "interactive/1"
    assert redis_address(parse_cluster(CLUSTER.format(REDIS))) == ("127.0.0.1", 7000)
    assert redis_address(parse_cluster(CLUSTER.format(""))) is None


def test_a_file_with_nothing_to_start_is_refused() -> None:
    settings = parse_cluster('[[pool]]\nname = "remote"\nmembers = ["10.0.0.1:8000"]\n')
    with pytest.raises(InvalidArgument, match="no pool has models, so there is nothing to start here"):
        local_plan(settings, lambda: 1, str, nerite="nerite")


def test_the_router_needs_a_port_that_is_known() -> None:
    text = "[router]\nhttp-port = 0\n[[pool]]\nname = 'a'\nmodels = 'm'\n"
    with pytest.raises(InvalidArgument, match=r"router\.http-port is 0, any free port: choose one"):
        local_plan(parse_cluster(text), lambda: 1, str, nerite="nerite")


def test_the_plan_is_a_line_for_each_process() -> None:
    lines = plan_text(plan()).splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["interactive/1", "nerite", "serve"], ["interactive/2", "nerite", "serve"], ["router", "nerite", "route"],
    ]  # fmt: skip


ROLLOUT = '[[pool]]\nname = "a"\nmodels = "m"\nreplicas = 2\n[pool.rollout.models.resnet]\nfrom = "1"\nto = "2"\n'


def test_servers_of_a_rollout_keep_its_state_apart_and_begin_with_the_baseline() -> None:
    ports, settings = count(9000), parse_cluster(ROLLOUT)
    first, second, router = local_plan(settings, lambda: next(ports), str, "/state/{}".format, nerite="nerite")
    assert first.arguments[-2:] == ("--rollout-state=/state/a/1", "--rollout-baseline=resnet=1")
    assert second.arguments[-2:] == ("--rollout-state=/state/a/2", "--rollout-baseline=resnet=1")
    assert not any("rollout" in word for word in router.arguments)
    assert rollout_lines(settings) == [
        "rollout of resnet in pool a: version 1 to 2, 1, 5, 25, 50, 100 % of the requests, each held for 5m and 20 "
        "requests, gates errors, p99, stay after 2h"
    ]


def test_flags_are_of_local_servers_only() -> None:
    with pytest.raises(InvalidArgument, match=r"cluster\.toml:4: pool\.1\.flags: has an effect with models only"):
        parse_cluster('[[pool]]\nname = "a"\nmembers = ["h:1"]\nflags = ["--x"]\n')
    with pytest.raises(InvalidArgument, match="must be a list of flags of nerite serve"):
        parse_cluster('[[pool]]\nname = "a"\nmodels = "m"\nflags = ["x"]\n')
