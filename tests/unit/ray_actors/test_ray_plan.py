"""What a cluster file needs in Ray, and what is replaced when the file has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.cluster.cluster_file import parse_cluster
from nerite.core.errors import InvalidArgument
from nerite.ray.actors import with_paths
from nerite.ray.command import run
from nerite.ray.plan import RayPlan, plan_text, ray_plan

FILE = """
[[pool]]
name = "a"
models = "models"
replicas = 2

[pool.resources]
cpus = 2
gpus = 4
memory = "1GiB"
custom = { spot = 1 }

[[pool]]
name = "b"
models = "s3://bucket/models"

[pool.resources]
cpus = 0
engine-places-gpus = true
"""


def planned(text: str = FILE, name: str = "c") -> RayPlan:
    return ray_plan(with_paths(parse_cluster(text, "/p/cluster.toml")), name)


def test_a_server_has_the_resources_of_its_pool() -> None:
    a, b = planned().pools
    assert a.bundle == {"CPU": 2, "GPU": 4, "memory": 1 << 30, "spot": 1}
    assert b.bundle == {"CPU": 0.001} and b.engine_places_gpus
    assert a.pool.source.models == "/p/models" and b.pool.source.models == "s3://bucket/models"


def test_without_resources_a_server_has_a_processor() -> None:
    (pool,) = planned('[[pool]]\nname = "a"\nmodels = "m"').pools
    assert pool.bundle == {"CPU": 1}


@pytest.mark.parametrize(
    ("before", "after", "servers", "router"),
    [
        ("gpus = 4", "gpus = 2", True, True),
        ('"models"', '"others"', True, True),
        ("replicas = 2", "replicas = 3", False, True),
        ('"a"\n', '"a"\nlends = 2\n', False, True),
        ('"a"\n', '"a"\nrollout.models.resnet = { from = "1", to = "2" }\n', False, True),
        ("", "", False, False),
    ],
)
def test_what_a_change_replaces(before: str, after: str, servers: bool, router: bool) -> None:
    old, new = planned(), planned(FILE.replace(before, after) if before else FILE)
    assert (old.pools[0].digest != new.pools[0].digest) == servers
    assert (old.router_digest != new.router_digest) == router
    assert old.pools[1].digest == new.pools[1].digest


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[pool]]\nname = "a"\nmembers = ["h:1"]', "no pool has models"),
        ('[router]\nhttp-port = 0\n[[pool]]\nname = "a"\nmodels = "m"', "router.http-port is 0"),
    ],
)
def test_files_with_nothing_to_start(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        planned(text)


def test_the_plan_for_people() -> None:
    first, second, router = plan_text(planned()).splitlines()
    assert first == "a       2 x nerite serve /p/models  (2 CPU, 4 GPU, 1 GiB, 1 spot each)"
    assert "GPUs by the engine" in second
    assert router.startswith("router  nerite route on this node, HTTP on 127.0.0.1:8000")
    rollout = '"a"\nrollout.models.resnet = { from = "1", to = "2" }\n'
    *_, last = plan_text(planned(FILE.replace('"a"\n', rollout))).splitlines()
    assert last.startswith("rollout of resnet in pool a: version 1 to 2, 1, 5, 25, 50, 100 % of the requests")


def test_the_plan_needs_no_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    assert run(["up", str(file), "--plan"]) == 0
    assert "2 x nerite serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["status", "cluster.toml", "--plan"], "--plan has an effect with up only"),
        (["members", "cluster.toml"], "members needs NAME/POOL"),
        (["down", "é.toml"], "the name of the cluster must be"),
        (["up", "/nowhere/cluster.toml"], "/nowhere/cluster.toml"),
    ],
)
def test_command_lines_that_are_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) in (1, 2)
    assert told in capsys.readouterr().err


def test_without_ray_it_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert run(["status", str(tmp_path / "cluster.toml")]) == 1
    assert "pip install 'nerite[ray]'" in capsys.readouterr().err
