"""``nerite up``: a whole cluster file on this machine, as docs/platform.md shows it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

from nerite.cluster.cluster_file import parse_cluster, read_cluster
from nerite.tools.rollout.replicas import ReplicaSource
from pages import ROOT, Page, run
from ports import free_ports
from process_family import lives, processes_of
from serving import NERITE, adds, eventually, python_model
from tools import require
from up_clusters import up

PAGE = Page("docs/platform.md")
CLUSTER = """
[router]
http-port = {}
grpc-port = {}
metrics-port = {}

[[pool]]
name = "main"
models = "models"
replicas = 2
health-interval = "200ms"
"""


def cluster(folder: Path) -> tuple[Path, str]:
    """Write a cluster file and its models; return it, and where its router listens."""
    http, grpc, metrics = free_ports(3)
    python_model(folder / "models", "adder", adds(1))
    file = folder / "cluster.toml"
    file.write_text(CLUSTER.format(http, grpc, metrics))
    return file, f"127.0.0.1:{http}"


def metrics_port(file: Path) -> int:
    return read_cluster(str(file)).router.metrics_port


def answer(router: str) -> str:
    body = '{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}'
    return run(["curl", "-sS", f"http://{router}/v2/models/adder/infer", "-d", body])


def test_what_ends_is_started_again_and_at_the_end_nothing_is_left(tmp_path: Path) -> None:
    file, router = cluster(tmp_path)
    with up(file, tmp_path) as running:
        assert '"data":[2.0]' in answer(router)
        before = running.pid_of(running.address_of("main/1"))
        os.kill(before, signal.SIGKILL)
        for _ in range(20):
            assert '"data":[2.0]' in answer(router)
        eventually(lambda: "main/1 has ended with signal SIGKILL; it is started again in" in running.text)
        eventually(lambda: running.text.count("everything is ready") == 2)
        family = processes_of(running.process.pid)
        assert len(family) >= 3
        again = subprocess.run([str(NERITE), "up", str(file)], capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert "router.http-port is" in again.stderr and "another nerite up of this file" in again.stderr
        assert '"data":[2.0]' in answer(router)
        source = ReplicaSource([], f"pool:127.0.0.1:{metrics_port(file)}/main")
        assert source.look() == [running.address_of(name) for name in ("main/1", "main/2")]
        other = ReplicaSource([], f"pool:127.0.0.1:{metrics_port(file)}/other")
        assert (other.look(), "has no pool 'other', but main" in other.problem) == ([], True)
    assert running.process.returncode == 0
    eventually(lambda: not any(map(lives, family)), what="processes are left")
    stopped = re.findall(r"^stopping (\S+)", running.text, re.MULTILINE)
    assert stopped == ["router", "main/2", "main/1"]


def test_when_it_is_killed_its_processes_end(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    with up(file, tmp_path) as running:
        family = processes_of(running.process.pid)
        running.process.kill()
        eventually(lambda: not any(map(lives, family)), what="processes are left")


def test_a_mistake_is_told_before_anything_starts(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    file.write_text(file.read_text().replace("[router]", '[router]\npolicy-file = "policy.toml"'))
    (tmp_path / "policy.toml").write_text("[tenants.acme]\nrequest_per_minute = 1\n")
    done = subprocess.run([str(NERITE), "up", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "policy.toml:2: tenants.acme.request_per_minute: is not known" in done.stderr


def test_the_page(tmp_path: Path) -> None:
    require("redis-server")
    plan, started = PAGE.block("--plan").splitlines()
    lines = run(plan).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("redis")] == [
        "interactive/1", "interactive/2", "batch/1", "router",
    ]  # fmt: skip
    assert started == plan.removesuffix(" --plan")
    http, grpc, metrics, redis = free_ports(4)
    text = (ROOT / shlex.split(started)[2]).read_text()
    for port, other in ((8000, http), (8001, grpc), (8002, metrics), (6379, redis)):
        text = text.replace(str(port), str(other))
    text = text.replace("../sources", str(ROOT / "examples" / "sources"))
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    (tmp_path / "policy.toml").write_bytes((ROOT / "examples" / "platform" / "policy.toml").read_bytes())
    assert [pool.name for pool in parse_cluster(text).pools] == ["interactive", "batch"]
    with up(file, tmp_path) as running:
        assert running.address_of("redis") == f"127.0.0.1:{redis}"
        answers = [
            run(command.replace(":8000", f":{http}").replace(":8002", f":{metrics}"))
            for command in PAGE.block("curl -N").splitlines()
        ]
    assert answers[0] == ""
    assert [each.count('"text":') for each in answers[1:3]] == [20, 20]
    counted = set(re.findall(r'nerite_router_requests{code="200",member="([^/"]+)/', answers[3]))
    assert counted == {"interactive", "batch"}


def test_models_that_are_placed(tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    text = (ROOT / "examples" / "placement" / "cluster.toml").read_text()
    for port, other in ((8000, http), (8001, grpc), (8002, metrics)):
        text = text.replace(str(port), str(other))
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace('"../sources"', f'"{ROOT / "examples" / "sources"}"'))
    with up(file, tmp_path) as running:
        eventually(lambda: "has loaded model 'scaler'" in running.text)
        ask = ["curl", "-sS", f"http://127.0.0.1:{http}/v2/models/babble/generate_stream"]
        assert run([*ask, "-d", '{"prompt": "The sea", "length": 3}']).count('"text":') == 3
        eventually(lambda: "has loaded model 'babble'" in running.text)
