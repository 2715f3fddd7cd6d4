"""Pools that ``nerite up`` scales: from nothing and back, with standbys, and through a burst without a failure."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ports import free_ports
from process_family import command_of, processes_of
from serving import eventually, python_model
from up_clusters import Up, up

CLUSTER = """
[router]
http-port = {}
grpc-port = {}
metrics-port = {}

[[pool]]
name = "main"
models = "models"
health-interval = "200ms"

[pool.scaling]
{}
"""
SLOW = """
def execute(self, requests):
    time.sleep(0.05)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.ones((1, 1), np.float32))]) for _ in requests]
"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]})


class Platform:
    """The router of a cluster that runs."""

    def __init__(self, ports: list[int]) -> None:
        self._http, _, self._metrics = ports

    def infer(self, model: str) -> tuple[int, http.client.HTTPMessage]:
        """Return status and headers of the answer to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http, timeout=60)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", BODY)
            response = connection.getresponse()
            response.read()
            return response.status, response.headers
        finally:
            connection.close()

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    @property
    def pool(self) -> dict[str, Any]:
        (pool,) = json.loads(self.get("/v2/pools"))["pools"]
        return dict(pool)

    def answered(self, model: str) -> bool:
        """Send a request; a refusal says when to come again."""
        status, headers = self.infer(model)
        assert status == 200 or (status == 503 and int(headers["Retry-After"]) >= 1), status
        return status == 200


def cluster(folder: Path, scaling: str) -> tuple[Path, Platform]:
    ports = free_ports(3)
    python_model(folder / "models", "slow", SLOW)
    file = folder / "cluster.toml"
    file.write_text(CLUSTER.format(*ports, scaling))
    return file, Platform(ports)


def servers(running: Up) -> int:
    """Return the number of ``nerite serve`` processes."""
    return sum("serve" in command_of(pid) for pid in processes_of(running.process.pid))


def test_from_nothing_and_back(tmp_path: Path) -> None:
    file, router = cluster(tmp_path, 'min = 0\nmax = 2\nconcurrency = 4\nidle = "2s"')
    with up(file, tmp_path) as running:
        assert servers(running) == 0
        assert router.pool["wanted"] == 0
        assert router.infer("slow")[0] == 200, "it waits for a server"
        assert "starting main/1" in running.text
        assert 'nerite_router_members_wanted{pool="main"} 1' in router.get("/metrics")
        eventually(lambda: servers(running) == 0, what="the idle server is still there")
        assert "main/1 leaves the pool: no request for 2 s" in running.text
        eventually(lambda: router.answered("slow"))
    assert running.process.returncode == 0


def test_a_standby_is_woken_and_replaced(tmp_path: Path) -> None:
    file, router = cluster(tmp_path, 'min = 0\nmax = 2\nwarm = 1\nconcurrency = 4\nidle = "1h"')
    with up(file, tmp_path) as running:
        assert "main/1 stands by at" in running.text
        assert router.pool["members"] == []
        eventually(lambda: router.answered("slow"))
        assert "waking main/1" in running.text
        assert "starting" not in running.text
        assert [member["name"] for member in router.pool["members"]] == ["main/1"]
        eventually(lambda: "main/2 stands by at" in running.text)


def test_no_request_fails_in_a_burst_and_after_it(tmp_path: Path) -> None:
    scaling = 'min = 1\nmax = 3\nconcurrency = 3\nheadroom = 0\nstabilization = "4s"'
    file, router = cluster(tmp_path, scaling)
    codes: Counter[int] = Counter()
    calm, end = threading.Event(), threading.Event()

    def ask(patient: bool) -> None:
        while not end.is_set() and (patient or not calm.is_set()):
            codes[router.infer("slow")[0]] += 1
            if patient:
                time.sleep(0.02)

    with up(file, tmp_path) as running:
        clients = [threading.Thread(target=ask, args=(number == 0,)) for number in range(9)]
        for client in clients:
            client.start()
        try:
            eventually(lambda: router.pool["ready"] == 3, what="there are not three members")
            served = codes.total()
            eventually(lambda: codes.total() > served + 100)
            calm.set()
            eventually(lambda: servers(running) == 1, what="the members of the burst are still there")
            served = codes.total()
            eventually(lambda: codes.total() > served + 10)
        finally:
            calm.set()
            end.set()
            for client in clients:
                client.join()
        assert set(codes) == {200}
        # One leaves and comes back where the machine keeps the clients of the burst from asking for a while.
        assert set(re.findall(r"^(main/\d) leaves", running.text, re.MULTILINE)) == {"main/2", "main/3"}
