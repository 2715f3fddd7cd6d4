"""docs/front-processes.md: a server started as it says has such processes, and spreads connections as it says."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path

import grpc
import pytest

from nerite.server_components import automatic_fronts
from nerite.wire import grpc_service
from nerite.wire.schema import methods
from onnx_models import identity, save
from pages import Page, rows, run
from serving import PATIENCE, Serving, eventually, serving
from tools import require

PAGE = Page("docs/front-processes.md")
INFER = "/inference.GRPCInferenceService/ModelInfer"
BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    save(tmp_path / "models" / "m", identity())
    return tmp_path / "models"


def inferences(server: Serving) -> list[float]:
    """Return the inferences of each front so far."""
    found = server.metrics()
    return [count for name, count in sorted(found.items()) if name.startswith("nerite_front_requests_total")]


def test_the_page(models: Path, tmp_path: Path) -> None:
    require("curl")
    (flag,) = PAGE.block("serve").split()[3:]
    assert flag == "--front-processes=4"
    with serving(models, tmp_path / "log", flag) as server:
        for _ in range(8):
            assert server.ask("POST", "/v2/models/m/infer", BODY)[0] == 200
        command = PAGE.block("curl").replace("localhost:8002", f"localhost:{server.ports['Metrics']}")
        samples = dict(line.rpartition(" ")[::2] for line in run(command).splitlines())
        assert {name.partition("{")[0] for name in samples} == {*rows("docs/front-processes.md", "metric")}
        assert samples["nerite_front_processes"] == "4"
        assert sum(inferences(server)) == 8


def test_as_many_as_the_page_says() -> None:
    assert [automatic_fronts(processors) for processors in (1, 5, 6, 9, 24, 128)] == [1, 1, 2, 3, 8, 8]


class HttpClients:
    """Clients with a connection each, which ask one after the other until they are stopped."""

    def __init__(self, server: Serving, count: int) -> None:
        self._connections = [http.client.HTTPConnection(server.http, timeout=PATIENCE) for _ in range(count)]
        self.closings = 0
        """Replies with which the server has closed a connection."""
        self.failures: list[object] = []
        self._stop = False
        self._threads: list[threading.Thread] = []
        for connection in self._connections:
            connection.connect()
            self._ask(connection)

    def run(self, chosen: slice) -> None:
        """Have some of them ask as fast as they can."""
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in self._connections[chosen]]
        for thread in self._threads:
            thread.start()

    def _run(self, connection: http.client.HTTPConnection) -> None:
        try:
            while not self._stop:
                self._ask(connection)
        except Exception as error:
            self.failures.append(error)

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", "/v2/models/m/infer", BODY)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        self.closings += answer.getheader("Connection") == "close"  # the next request opens another connection

    def stop(self) -> None:
        self._stop = True
        for each in self._threads:
            each.join(PATIENCE)
        for connection in self._connections:
            connection.close()


def test_connections_of_a_busy_front_are_spread_anew(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--front-processes=2") as server:
        clients = HttpClients(server, 4)
        try:
            assert inferences(server) == [2, 2]
            clients.run(slice(0, 4, 2))  # those that the first front has
            eventually(lambda: clients.closings == 1)
            before = inferences(server)
            time.sleep(1)
            shares = [later - earlier for earlier, later in zip(before, inferences(server), strict=True)]
            assert min(shares) > 0.4 * max(shares) > 0
        finally:
            clients.stop()
        assert clients.failures == []


def test_grpc_connections_of_a_busy_front_are_spread_anew(models: Path, tmp_path: Path) -> None:
    request = grpc_service.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    kinds = methods()[INFER]
    with serving(models, tmp_path / "log", "--front-processes=2") as server:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(server.grpc, options) for _ in range(4)]
        calls = [
            channel.unary_unary(INFER, kinds.request.SerializeToString, kinds.response.FromString)
            for channel in channels
        ]
        try:
            for call in calls:
                call(request, timeout=PATIENCE)
            assert inferences(server) == [2, 2]
            deadline = time.monotonic() + PATIENCE
            shares: list[float] = [1, 0]
            while min(shares) < 0.4 * max(shares):
                assert time.monotonic() < deadline
                before, until = inferences(server), time.monotonic() + 1
                while time.monotonic() < until:
                    for call in calls[::2]:
                        call(request, timeout=PATIENCE)
                shares = [later - earlier for earlier, later in zip(before, inferences(server), strict=True)]
        finally:
            for channel in channels:
                channel.close()
