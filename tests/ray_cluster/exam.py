"""Servers on nodes of Ray that are lost, drain and come, under load: ``make exam-ray``. Needs root and ``ip``.

Each node is a host in a network namespace. Requests come from outside, through the router on the first host.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pages import Page
from ray_hosts import NET, RAY, ROOT, Host, hosts
from serving import adds, eventually, python_model
from tools import require

JOINS = 400.0
"""Seconds that a node may take to join on a busy machine."""
pytestmark = pytest.mark.timeout(1800)
PAGE = Page("docs/ray.md")
CLUSTER = f"""
[router]
address = "{NET}.1"
exit-timeout = "5s"

[[pool]]
name = "main"
models = "models"
replicas = 2
health-interval = "500ms"

[pool.resources]
cpus = 1
custom = {{ serves = 1 }}
"""
DRIP = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(40):
            time.sleep(0.05)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Forty numbers in two seconds."""
DRIP_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }]
instance_group [{ kind: KIND_CPU count: 4 }]
"""


class Load:
    """Clients that ask one after the other, without retries."""

    def __init__(self, host: str, requests: int = 4, streams: int = 4) -> None:
        self._host = host
        self._stop = threading.Event()
        self.answers: list[str] = []
        """What was wrong with each; empty if nothing was."""
        self.streams: list[str] = []
        self._threads = [threading.Thread(target=self._request) for _ in range(requests)]
        self._threads += [threading.Thread(target=self._stream) for _ in range(streams)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _request(self) -> None:
        while not self._stop.is_set():
            wrong = self._wrong("/v2/models/add/infer", [[1.0]], lambda text: "" if "[2" in text else text)
            self.answers.append(wrong)
            time.sleep(0.02)

    def _stream(self) -> None:
        while not self._stop.is_set():
            wrong = self._wrong("/v2/models/drip/generate_stream", None, _of_stream)
            self.streams.append(wrong)

    def _wrong(self, path: str, data: list[list[float]] | None, judge: object) -> str:
        body = {"INPUT0": [1.0]} if data is None else {
            "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": data}]
        }  # fmt: skip
        connection = http.client.HTTPConnection(self._host, 8000, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
            return judge(text) if response.status == 200 else f"{response.status} {text}"  # type: ignore[operator]
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()

    @property
    def failed(self) -> tuple[list[str], list[str]]:
        """What was wrong with requests, and with streams."""
        return [text for text in self.answers if text], [text for text in self.streams if text]

    @property
    def summary(self) -> str:
        requests, streams = self.failed
        counts = (
            f"{len(requests)} of {len(self.answers)} requests, {len(streams)} of {len(self.streams)} streams failed"
        )
        return f"{counts} {sorted({*requests, *streams})[:3] or ''}"


def _of_stream(text: str) -> str:
    if '"error"' in text:
        return text[text.index('{"error"') :].strip()[:300]
    return "" if text.count("data:") >= 40 else f"{text.count('data:')} numbers and no reason"


class Platform:
    """What ``nerite ray up`` has started on the first host."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.machines = machines
        self.head = machines[0]
        self.folder = folder
        self.file = folder / "cluster.toml"

    def ray(self, *words: str, fails: bool = False) -> str:
        return self.head.run(["nerite", "ray", *words], fails=fails, cwd=self.folder)

    def members(self) -> dict[str, str]:
        """Return the ready members that the router has, and their addresses."""
        connection = http.client.HTTPConnection(self.head.address, 8002, timeout=5)
        try:
            connection.request("GET", "/v2/pools")
            (pool,) = json.loads(connection.getresponse().read())["pools"]
            return {each["name"]: each["http"].partition(":")[0] for each in pool["members"] if each["ready"]}
        except (OSError, http.client.HTTPException):
            return {}
        finally:
            connection.close()


def joins(host: Host, head: Host) -> None:
    host.join(head, resources='{"serves": 2}')


@contextmanager
def ray_hosts(count: int) -> Iterator[list[Host]]:
    require("ip")
    assert (RAY / "bin" / "ray").exists(), f"{RAY} has no Ray: make exam-ray"
    with hosts(count) as machines:
        yield machines


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("ray")
    python_model(folder / "models", "add", adds(1))
    python_model(folder / "models", "drip", DRIP, DRIP_CONFIG)
    (folder / "cluster.toml").write_text(CLUSTER)
    with ray_hosts(4) as machines:
        machines[0].join()
        eventually(lambda: machines[0].has(machines[0]), JOINS)
        for host in machines[1:3]:
            joins(host, machines[0])
        eventually(lambda: machines[0].has(*machines[:3]), JOINS)
        yield Platform(machines, folder)


def test_the_page(tmp_path: Path) -> None:
    """Its commands are run one after the other, on a host where nothing runs."""
    first = PAGE.block("ray start --head").replace("pip install", "true pip install")
    assert len(first.strip().splitlines()) < 10
    with ray_hosts(1) as (host,):
        told = host.run(first, seconds=400)
        assert "everything is ready" in told and "INFERENCE" not in told
        assert '"text"' in told
        told = host.run(PAGE.block("nerite ray status"))
        assert "2 of 2 ready" in told
        assert "has ended" in host.run(PAGE.block("nerite ray down"))


def test_a_deployment_of_ray_serve(tmp_path: Path) -> None:
    """The program of the page, with models of the test."""
    with ray_hosts(1) as (host,):
        host.join(cpus=4)
        eventually(lambda: host.has(host), JOINS)
        (tmp_path / "program.py").write_text(PAGE.block("serve.run"))
        host.run(["python", str(tmp_path / "program.py")], seconds=400, cwd=ROOT)
        ready = host.run("curl -s -o /dev/null -w '%{http_code}' localhost:8000/v2/health/ready")
        assert ready == "200"
        body = '{"prompt": "The sea", "length": 20}'
        streamed = host.run(f"curl -sN localhost:8000/v2/models/babble/generate_stream -d '{body}'")
        assert streamed.count("data:") >= 20
        wrong = host.run("curl -s localhost:8000/v2/models/none/infer -d '{}'")
        assert "none" in wrong and "error" in wrong


def test_everything_comes_up_spread_over_the_nodes(platform: Platform) -> None:
    began = time.monotonic()
    told = platform.ray("up", "cluster.toml")
    assert "everything is ready: requests go to http://10.213.87.1:8000" in told
    print(f"\nup: {time.monotonic() - began:.1f} s")
    eventually(lambda: len(platform.members()) == 2)
    assert sorted(platform.members().values()) == [f"{NET}.2", f"{NET}.3"]
    before = platform.members()
    began = time.monotonic()
    platform.ray("up", "cluster.toml")
    assert platform.members() == before
    print(f"up again, nothing changed: {time.monotonic() - began:.1f} s")
    assert "pool main: 2 of 2 ready" in platform.ray("status", "cluster.toml")
    with Load(platform.head.address) as load:
        eventually(lambda: len(load.streams) >= 8 and len(load.answers) >= 100)
    assert load.failed == ([], [])


def test_a_server_that_is_killed_is_started_again_on_its_node(platform: Platform) -> None:
    victim = platform.machines[1]
    (pid,) = victim.run("pgrep --ns $$ --nslist net -f 'nerite serve.*--http-port'").split()[:1]
    with Load(platform.head.address) as load:
        eventually(lambda: len(load.answers) > 50)
        killed = time.monotonic()
        victim.run(f"kill -9 {pid}")
        eventually(lambda: len(platform.members()) == 1, what="it still has both")
        gone = time.monotonic() - killed
        eventually(lambda: len(platform.members()) == 2)
        back = time.monotonic() - killed
        time.sleep(3)
    requests, streams = load.failed
    print(f"\nserver killed: member gone after {gone:.2f} s, capacity back after {back:.1f} s, {load.summary}")
    assert requests == [] and len(streams) <= 4 and all("no reason" not in each for each in streams)


def test_a_node_that_drains_loses_no_request(platform: Platform) -> None:
    draining, new = platform.machines[1], platform.machines[3]
    joins(new, platform.head)
    eventually(lambda: platform.head.has(new), JOINS)
    node = platform.head.nodes()[draining.address]
    with Load(platform.head.address) as load:
        eventually(lambda: len(load.answers) > 50)
        began = time.monotonic()
        platform.head.run(
            f"ray drain-node --address={platform.head.address}:6379 --node-id={node} "
            "--reason=DRAIN_NODE_REASON_PREEMPTION --reason-message=exam --deadline-remaining-seconds=120"
        )
        eventually(lambda: sorted(platform.members().values()) == [f"{NET}.3", f"{NET}.4"], JOINS)
        moved = time.monotonic() - began
        eventually(lambda: "drain" not in platform.ray("status", "cluster.toml"))
        time.sleep(3)
    print(f"\nnode drained: another server took its place after {moved:.1f} s; {load.summary}")
    assert load.failed == ([], [])
    draining.kill()


def test_a_node_that_is_lost_takes_only_its_requests(platform: Platform) -> None:
    """There is no other node with room until one is added."""
    lost, new = platform.machines[2], platform.machines[1]
    eventually(lambda: len(platform.head.nodes()) == 3, JOINS)
    with Load(platform.head.address) as load:
        eventually(lambda: len(load.answers) > 50)
        began = time.monotonic()
        lost.kill()
        eventually(lambda: list(platform.members().values()) in ([f"{NET}.4"], [f"{NET}.4"] * 2), 60)
        gone = time.monotonic() - began
        eventually(lambda: len(platform.members()) == 2, 120)
        back = time.monotonic() - began
        time.sleep(3)
    requests, streams = load.failed
    print(f"\nnode killed: its member gone after {gone:.2f} s, capacity back after {back:.1f} s; {load.summary}")
    assert requests == [] and len(streams) <= 4 and all("no reason" not in each for each in streams)
    joins(new, platform.head)


def test_a_node_that_vanishes_and_one_that_is_added(platform: Platform) -> None:
    """Of a host whose cable is cut nobody hears anything, not even that connections have ended."""
    lost, new = platform.machines[3], platform.machines[1]
    eventually(lambda: platform.head.has(new), JOINS)
    new.kill()
    eventually(lambda: not platform.head.has(new), JOINS)
    with Load(platform.head.address) as load:
        eventually(lambda: len(load.answers) > 50)
        began = time.monotonic()
        lost.cut()
        joins(new, platform.head)
        eventually(lambda: set(platform.members().values()) == {new.address}, 180)
        eventually(lambda: len(platform.members()) == 2, 180)
        back = time.monotonic() - began
        time.sleep(3)
    _, streams = load.failed
    print(f"\nall servers cut off, a node added: capacity back after {back:.1f} s; {load.summary}")
    assert all("no reason" not in each for each in streams)


def test_the_number_of_servers_follows_the_load(platform: Platform) -> None:
    scaling = '[pool.scaling]\nmin = 1\nmax = 2\nconcurrency = 2\nstabilization = "5s"\n'
    platform.file.write_text(f"{CLUSTER.replace('replicas = 2', '')}\n{scaling}")
    platform.ray("up", "cluster.toml")
    eventually(lambda: len(platform.members()) == 1, JOINS)
    began = time.monotonic()
    with Load(platform.head.address) as load:
        eventually(lambda: len(platform.members()) == 2, JOINS, "there is no second server under load")
        more = time.monotonic() - began
        eventually(lambda: len(load.streams) >= 8)
    began = time.monotonic()
    eventually(lambda: len(platform.members()) == 1, JOINS, "there are two servers without load")
    less = time.monotonic() - began
    print(f"\nscaled: two servers after {more:.1f} s of load, one {less:.1f} s after its end; {load.summary}")
    assert load.failed == ([], [])


def test_down_takes_everything_away(platform: Platform) -> None:
    """Before, a router of another file follows the servers."""
    platform.file.write_text(CLUSTER.replace("replicas = 2", "replicas = 1"))
    platform.ray("up", "cluster.toml")
    eventually(lambda: len(platform.members()) == 1)
    router = platform.folder / "outside.toml"
    router.write_text('[router]\nhttp-port = 9000\ngrpc-port = 0\nmetrics-port = 9002\n'
                      f'address = "{NET}.1"\n[[pool]]\nname = "main"\nray = "cluster/main"\n')  # fmt: skip
    process = platform.head.start("nerite", "route", str(router))
    eventually(lambda: _status(platform.head.address, 9000, "/v2/models/add") == 200, JOINS)
    process.terminate()
    process.wait(60)
    eventually(lambda: "drains" not in platform.ray("status", "cluster.toml"), JOINS)
    told = platform.ray("down", "cluster.toml")
    assert told.count("has ended") == 2 and "router has ended" in told
    assert "nothing runs under the name cluster" in platform.ray("status", "cluster.toml", fails=True)
    assert "nothing runs" in platform.ray("down", "cluster.toml")
    serving = platform.head.run("pgrep -f 'nerite serv[e].*10.213.87' || true")
    assert serving.strip() == ""


def _status(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
