"""Releases of the Helm chart come, change and go under load: no request fails and no stream is cut."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubernetes_cluster import Cluster, cluster
from kubernetes_tools import CHART, ROOT, run
from serving import PATIENCE, adds, eventually, python_model

LENGTH = 60
PROMPT = json.dumps({"prompt": "a", "length": LENGTH})
CLIENTS = 4
VALUES = {
    "router": {"enabled": True, "replicaCount": 2},
    "replicaCount": 2,
    "preStopSeconds": 1,
    "exitSeconds": 30,
    "poolToml": 'health-interval = "500ms"',
}
ROUTER = "r-nerite-router"


class _Client(threading.Thread):
    """Sends requests to a service one after the other, each on a connection to one of its endpoints."""

    def __init__(self, among: Cluster, streams: bool) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.over = threading.Event()
        self._among = among
        self._streams = streams
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            addresses = self._among.addresses(ROUTER)
            if not addresses:
                self.found["no endpoint"] += 1
                return
            try:
                self.found[self._ask(random.choice(addresses))] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.found[repr(error)] += 1

    def _ask(self, address: str) -> str:
        connection = http.client.HTTPConnection(address, 8000, timeout=PATIENCE)
        try:
            if self._streams:
                connection.request("POST", "/v2/models/babble/generate_stream", PROMPT)
                answer = connection.getresponse()
                events = answer.read().decode().count("data: {")
                return "whole" if (answer.status, events) == (200, LENGTH) else f"{answer.status} with {events} events"
            tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
            connection.request("POST", "/v2/models/add/infer", json.dumps({"inputs": [tensor]}))
            answer = connection.getresponse()
            body = answer.read()
            return "whole" if answer.status == 200 else f"{answer.status} {body.decode()}"
        finally:
            connection.close()


@contextmanager
def load(among: Cluster) -> Iterator[list[_Client]]:
    """Send requests and streams all the time."""
    clients = [_Client(among, streams=number % 2 == 0) for number in range(CLIENTS)]
    try:
        yield clients
    finally:
        for each in clients:
            each.over.set()
        for each in clients:
            each.join()


def write_models(folder: Path) -> None:
    python_model(folder, "add", adds(1))
    shutil.copytree(ROOT / "examples" / "sources" / "babble", folder / "babble")
    file = folder / "babble" / "1" / "model.py"
    source = file.read_text()
    slow = source.replace("        before = np.conc", "        time.sleep(0.01)\n        before = np.conc", 1)
    assert slow != source
    file.write_text(slow.replace("import numpy", "import time\n\nimport numpy", 1))


@pytest.mark.timeout(600)
def test_install_upgrade_rollback_uninstall_under_load(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    (tmp_path / "values.json").write_text(json.dumps(VALUES))
    config = str(tmp_path / "kubeconfig.json")

    def helm(*arguments: str) -> None:
        run("helm", *arguments, "--wait", "--timeout", "200s", home=tmp_path, KUBECONFIG=config)

    release = ("r", str(CHART), "-f", str(tmp_path / "values.json"))
    with cluster(tmp_path) as running:
        helm("install", *release)
        first = {pod.name for pod in running.pods}
        assert len(first) == 4
        with load(running) as clients:
            eventually(lambda: all(each.found for each in clients))
            helm("upgrade", *release, "--set", "serverArgs={--log-verbose=1}", "--set", "router.toml=attempts = 2")
            second = {pod.name for pod in running.pods if not pod.terminating}
            assert len(second) == 4 and not first & second
            helm("rollback", "r", "1")
            eventually(lambda: len(running.pods) == 4)
        assert [set(each.found) for each in clients] == [{"whole"}] * CLIENTS, [each.found for each in clients]
        assert {pod.status for pod in running.ended} == {0}, [(pod.name, pod.text[-2000:]) for pod in running.ended]
        helm("uninstall", "r")
        eventually(lambda: not running.pods)
        assert not running.api.find("secrets")
