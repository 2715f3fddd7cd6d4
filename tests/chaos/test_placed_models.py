"""Models that a router places, under load, on servers that are killed: no request fails, whatever has to be loaded."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_ports
from routing import pool, routing, samples
from serving import IDENTITY, IN_PROCESS, PATIENCE, Serving, eventually, pbtxt, python_model, serving

MODELS = 6
ROUNDS = 4
PLACEMENT = """
[pool.placement]
memory = "3GiB"
model-memory = "1GiB"
hold = "500ms"
rise = "500ms"
"""


class Place:
    """A server on fixed ports, which is killed and started again."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.ports = free_ports(3)
        self.address = f"127.0.0.1:{self.ports[0]}"
        self.starts = 0
        self._stack = ExitStack()
        self.server: Serving
        self.start()

    def start(self) -> None:
        self.starts += 1
        http, grpc, metrics = self.ports
        self.server = self._stack.enter_context(
            serving(
                self.folder / "models",
                self.folder / f"member-{self.number}-{self.starts}.log",
                "--model-control-mode=explicit",
                f"--http-port={http}",
                f"--grpc-port={grpc}",
                f"--metrics-port={metrics}",
                clean=False,
            )
        )

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def close(self) -> None:
        self._stack.close()


class Client(threading.Thread):
    """Asks one model after another, and counts what it gets."""

    def __init__(self, router: Serving, seed: int) -> None:
        super().__init__()
        self._router = router
        self._random = random.Random(seed)
        self.found: Counter[str] = Counter()
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._router.http, timeout=PATIENCE)
        while not self.over.is_set():
            value = self._random.randrange(1000)
            tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
            model = self._random.randrange(MODELS)
            connection.request("POST", f"/v2/models/m{model}/infer", json.dumps({"inputs": [tensor]}))
            answer = connection.getresponse()
            told = answer.read()
            right = answer.status == 200 and json.loads(told)["outputs"][0]["data"] == [value]
            self.found["right" if right else f"{answer.status} {told.decode()}"] += 1
        connection.close()


@contextmanager
def clients(router: Serving, count: int) -> Iterator[list[Client]]:
    made = [Client(router, seed) for seed in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.over.set()
        for each in made:
            each.join(PATIENCE)


def members_ready(router: Serving) -> float:
    return samples(router, "nerite_router_members_ready")['nerite_router_members_ready{pool="main"}']


def test_killed_servers_fail_no_request(tmp_path: Path) -> None:
    for number in range(MODELS):
        python_model(tmp_path / "models", f"m{number}", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with ExitStack() as stack:
        places = [Place(tmp_path, number) for number in range(3)]
        for each in places:
            stack.callback(each.close)
        table = pool(*(each.address for each in places), retry_floor=1000) + "[pool.ejection]\nmax-ejected = 0\n"
        router = stack.enter_context(routing(tmp_path, table + PLACEMENT))
        with clients(router, 4) as askers:

            def answers() -> int:
                return sum(each.found.total() for each in askers)

            def go_on(enough: int) -> None:
                eventually(lambda: answers() > enough)

            eventually(lambda: answers() > 200)
            for number in range(ROUNDS):
                place = places[number % 3]
                place.kill()
                go_on(answers() + 200)
                place.start()
                eventually(lambda: members_ready(router) == 3)
        assert [set(each.found) for each in askers] == [{"right"}] * 4
        assert samples(router, "nerite_router_held")['nerite_router_held{pool="main"}'] == 0
