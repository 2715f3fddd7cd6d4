"""docs/autoscaling.md: its tables have every key, its commands run, and its example for KEDA suits the router."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import yaml

from nerite.autoscaling.policy import ScalingPolicy
from nerite.cluster.cluster_file import parse_cluster
from nerite.wire import external_scaler as wire
from pages import ROOT, Page, rows, run
from routing import pool, routing, stand_ins
from serving import NERITE, Serving, adds, eventually, python_model
from tools import require

NAME = "docs/autoscaling.md"
PAGE = Page(NAME)
SCALING = '[pool.scaling]\nmin = 0\nmax = 4\nlatency = "1s"\n'


def words(column: str) -> set[str]:
    """Return the names in the first column of the table with this heading."""
    return {word for cell in rows(NAME, column) for word in re.findall(r"\w+", cell)}


def test_the_table_has_every_key_with_its_default() -> None:
    keys = words("`[pool.scaling]`")
    text = '[[pool]]\nname = "a"\nmodels = "m"\n[pool.scaling]\nmax = 4\n'
    for key in sorted(keys - {"max"}):
        try:
            parse_cluster(f"{text}{key} = []\n")
        except Exception as error:
            assert "is not known" not in str(error), key
    names = {"least": "min", "most": "max"}
    policy = {names.get(name, name) for name in ScalingPolicy.__dataclass_fields__}
    assert keys == policy | {"actuator", "target"}
    (scaled,) = parse_cluster(PAGE.block("warm = 1")).pools
    assert scaled.scaling == ScalingPolicy(least=1, most=8, warm=1, ttft=0.4, latency=5.0)


def test_the_report_has_the_fields_of_the_table(tmp_path: Path) -> None:
    require("curl")
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address) + SCALING) as router:
        command = PAGE.block("/v2/pools").replace("localhost:8002", f"localhost:{router.ports['Metrics']}")
        (report,) = json.loads(run(command))["pools"]
        assert words("field of a pool") == report.keys()
        assert [each["http"] for each in report["members"]] == [member.address]
        assert router.ask("GET", "/v2/pools")[0] == 404, "clients of the router need not see its members"


def test_the_standby(tmp_path: Path) -> None:
    require("curl")
    python_model(tmp_path / "models", "adder", adds(1))
    serve, wake = PAGE.block("--standby").splitlines()
    flags = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    with (tmp_path / "log").open("wb") as sink:
        command = [str(NERITE), *serve.split()[1:], *flags]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=sink, stderr=subprocess.STDOUT)
    server = Serving(process, tmp_path / "log")
    try:
        server.started = "Stands by to load 1 model"
        server.wait()
        assert not server.ready()
        run(wake, server)
        assert server.ready()
    finally:
        assert server.stop() == 0


def test_the_example_for_keda_is_answered_by_a_router(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "kubernetes" / "scaled-object.yaml").read_text()
    example: dict[str, Any] = yaml.safe_load(text)
    (trigger,) = example["spec"]["triggers"]
    (shown,) = yaml.safe_load(PAGE.block("external-push"))["triggers"]
    assert shown.items() <= trigger.items()
    assert (example["kind"], example["apiVersion"]) == ("ScaledObject", "keda.sh/v1alpha1")
    asked = wire.ScaledObjectRef(name="x", namespace="default", scalerMetadata=trigger["metadata"])
    table = pool("127.0.0.1:9", name="interactive") + SCALING
    with routing(tmp_path, table) as router, grpc.insecure_channel(router.grpc) as channel:
        ask = channel.unary_unary("/externalscaler.ExternalScaler/IsActive")

        def active() -> bool:
            return wire.IsActiveResponse.FromString(ask(asked.SerializeToString(), timeout=10)).result

        assert not active()
        assert router.ask("POST", "/v2/models/m/infer", b"{}", x_nerite_timeout_ms="200")[0] == 504
        eventually(active)
