"""docs/several-hosts.md in network namespaces: three hosts and a router; one vanishes under load, and comes back.

``make exam-hosts``; needs root.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from host_namespaces import Host, hosts, start
from pages import Page
from serving import IDENTITY, IN_PROCESS, eventually, pbtxt, python_model

PAGE = Page("docs/several-hosts.md")
SLOW_WORDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(60):
            if sender.is_cancelled():
                break
            time.sleep(0.1)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"word "], object))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TEXT = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU count: 4 }]
"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [7]}]})
CLIENTS, STREAMS = 8, 6
LONGEST = 60
BY_NAME = '\n[router]\naddress = "0.0.0.0"\nhttp-port = 9000\ngrpc-port = 9001\nmetrics-port = 9002\n'
"""Ports of a second router, whose members are the addresses of a name."""


class Fleet:
    """The hosts of the page, with what runs on them."""

    def __init__(self, folder: Path, made: list[Host]) -> None:
        self.folder = folder
        *self.servers, self.front, self.client = made
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._starts = 0

    def start(self, host: Host, command: str) -> None:
        """Run a command of the page on a host."""
        self._starts += 1
        log = self.folder / f"log-{host.name}-{self._starts}"
        self._running.setdefault(host.name, []).append(start(host, command.split(), self.folder, log))

    def lose(self, host: Host) -> None:
        """Have a host lose power: nobody is told."""
        host.unplug()
        for process in self._running.pop(host.name):
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop all that runs."""
        processes = [process for there in self._running.values() for process in there]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, port: int, path: str) -> str:
        """Ask the host in front; empty if it does not answer with 200."""
        found: list[str] = []

        def work() -> None:
            connection = http.client.HTTPConnection(self.front.address, port, timeout=10)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                text = answer.read().decode()
                if answer.status == 200:
                    found.append(text or "yes")
            except OSError:
                pass
            finally:
                connection.close()

        self.client.thread(work).join(20)
        return "".join(found)

    def answered(self) -> Counter[str]:
        """Return how many requests each server has answered."""
        pattern = re.compile(r'^nerite_router_requests\{.*?code="200".*?member="([^"]+)".*?\} (\S+)$', re.MULTILINE)
        return Counter({name: int(count) for name, count in pattern.findall(self.ask(8002, "/metrics"))})

    def ready(self, metrics: int = 8002) -> int:
        """Return the number of members of a router that get requests."""
        found = re.search(r"^nerite_router_members_ready\{.*\} (\d+)$", self.ask(metrics, "/metrics"), re.MULTILINE)
        return int(found[1]) if found else 0


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Run three servers and a router as the page says, and another router beside it."""
    python_model(folder / "models", "identity", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(folder / "models", "words", SLOW_WORDS, TEXT)
    (folder / "cluster.toml").write_text(PAGE.block("on the host in front\n[router]"))
    (folder / "by-name.toml").write_text(PAGE.block("gpus.example.org") + BY_NAME)
    (folder / "members.txt").write_text(PAGE.block("gpu-1:8000"))
    aliases = "".join(f"10.77.0.{number} gpus.example.org\n" for number in (1, 2, 3))
    with hosts(folder, "gpu-1", "gpu-2", "gpu-3", "front", "client", aliases=aliases) as made:
        running = Fleet(folder, made)
        try:
            for host in running.servers:
                running.start(host, command("on gpu-1"))
            running.start(running.front, command("nerite route"))
            running.start(running.front, command("nerite route").replace("cluster.toml", "by-name.toml"))
            eventually(lambda: running.ready() == running.ready(9002) == 3, seconds=80)
            yield running
        finally:
            running.stop()


def command(part: str) -> str:
    return PAGE.block(part).splitlines()[1]


class Load:
    """Clients that ask again and again, and streams; what became of them."""

    def __init__(self, running: Fleet) -> None:
        self.over = threading.Event()
        self.failed: list[str] = []
        self.slowest = 0.0
        self.answers = 0
        self.words: list[int] = []
        """Of each stream that has ended."""
        self.cut: list[str] = []
        """Errors of streams."""
        self._running = running
        client = running.client
        self._threads = [client.thread(self._tensors) for _ in range(CLIENTS)]
        self._threads += [client.thread(self._stream) for _ in range(STREAMS)]

    def end(self) -> None:
        """Have all ended."""
        self.over.set()
        for thread in self._threads:
            thread.join(LONGEST)
            assert not thread.is_alive()

    def _tensors(self) -> None:
        while not self.over.is_set():
            connection = http.client.HTTPConnection(self._running.front.address, 8000, timeout=LONGEST)
            try:
                while not self.over.wait(0.05):
                    began = time.monotonic()
                    connection.request("POST", "/v2/models/identity/infer", BODY)
                    answer = connection.getresponse()
                    text = answer.read()
                    if answer.status != 200:
                        self.failed.append(f"{answer.status}: {text.decode()}")
                    self.answers += 1
                    self.slowest = max(self.slowest, time.monotonic() - began)
            except OSError as error:
                self.failed.append(repr(error))
            finally:
                connection.close()

    def _stream(self) -> None:
        while not self.over.is_set():
            connection = http.client.HTTPConnection(self._running.front.address, 8000, timeout=LONGEST)
            try:
                connection.request("POST", "/v2/models/words/generate_stream", '{"text_input": "x"}')
                events = connection.getresponse().read().decode()
            except OSError as error:
                self.failed.append(repr(error))
                continue
            finally:
                connection.close()
            errors = re.findall(r'"error":\s*"(.*?)"', events)
            self.cut += errors
            if not errors:
                self.words.append(events.count("word "))


def grows(read: Callable[[], int], by: int) -> Callable[[], bool]:
    before = read()
    return lambda: read() >= before + by


@pytest.mark.timeout(240)
def test_a_host_vanishes_under_load_and_comes_back(tmp_path: Path) -> None:
    with fleet(tmp_path) as running:
        assert running.ask(8000, "/health")
        load = Load(running)
        eventually(lambda: min(running.answered()[f"gpu-{number}:8000"] for number in (1, 2, 3)) > 10)
        eventually(lambda: load.answers > 200)
        lost = running.servers[1]
        running.lose(lost)
        eventually(grows(lambda: load.answers, 200), what="requests to the other hosts stop")
        eventually(lambda: running.ready() == 2)
        lost.plug()
        running.start(lost, command("on gpu-1"))
        eventually(lambda: running.ready() == 3, seconds=80)
        eventually(grows(lambda: running.answered()["gpu-2:8000"], 10), what="the host that is back gets no requests")
        eventually(lambda: load.cut != [], what="no stream was cut")
        load.end()
        names = (tmp_path / "hosts").read_text().replace(f"{lost.address} gpus.example.org\n", "")
        (tmp_path / "hosts").write_text(names)
        eventually(lambda: running.ready(9002) == 3)
        eventually(lambda: running.ready(9002) == 2, what="the second router does not follow the name")
    assert load.failed == []
    assert load.slowest < 20
    assert 0 < len(load.cut) <= STREAMS
    assert all("gpu-2:8000" in error for error in load.cut), load.cut
    assert {*load.words} == {60}
