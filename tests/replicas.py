"""Three servers with the same models, a Prometheus that reads them every second, clients, and a fleet command."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forked_programs import start_program
from ports import free_ports
from prometheus_server import Prometheus, prometheus_server
from serving import IN_PROCESS, NERITE, PATIENCE, Serving, adds, eventually, pbtxt, python_model, serving
from tools import require

CONFIG = pbtxt(parameters=IN_PROCESS) + "\nversion_policy { specific { versions: [ 1 ] } }"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [7]}]}).encode()


class Replica:
    """One server on fixed ports, which may be killed and started again."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.http_port, self.metrics_port = ports
        self.url = f"localhost:{self.http_port}"
        self._stack = ExitStack()
        self._starts = 0
        (folder / "models").mkdir(parents=True)
        self.start()

    def start(self) -> None:
        """Start the server, with the state that it had."""
        self._starts += 1
        self.server: Serving = self._stack.enter_context(
            serving(
                self.folder / "models",
                self.folder / f"log{self._starts}",
                f"--http-port={self.http_port}",
                f"--metrics-port={self.metrics_port}",
                f"--rollout-state={self.folder}/state",
                "--front-processes=1",
                "--model-control-mode=explicit",
                "--load-model=*",
                clean=False,
            )
        )

    def kill(self) -> None:
        """End the server as a power failure would."""
        self.server.process.kill()
        self.server.process.wait()

    def close(self) -> None:
        """Stop the server."""
        self._stack.close()

    def add(self, model: str, candidate: str) -> None:
        """Load a model whose version 1 adds 1; ``candidate`` is the source of version 2."""
        python_model(self.folder / "models", model, adds(1), CONFIG)
        python_model(self.folder / "models", model, candidate, CONFIG, version=2)
        assert self.server.ask("POST", f"/v2/repository/models/{model}/load", b"")[0] == 200

    def status(self, model: str) -> dict[str, Any]:
        """Return the status of the rollout; empty if there is none."""
        code, _, body = self.server.ask("GET", f"/v2/models/{model}/rollout")
        found: dict[str, Any] = json.loads(body) if code == 200 else {}
        return found

    def served(self, model: str) -> float:
        """Return what the model adds."""
        return float(self.server.infer(model, [0.0])[0])


class Clients:
    """One client for each replica, which sends one request after the other. A replica that is down loses some."""

    def __init__(self, replicas: list[Replica], model: str) -> None:
        self._path = f"/v2/models/{model}/infer"
        self._stop = threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(replica.http_port,)) for replica in replicas]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        while not self._stop.wait(0.002):
            try:
                connection.request("POST", self._path, BODY)
                reply = connection.getresponse()
                body = json.loads(reply.read())
                self.answers[body["model_version"] if reply.status == 200 else f"status {reply.status}"] += 1
            except (OSError, http.client.HTTPException, ValueError):
                connection.close()
                self._stop.wait(0.1)
        connection.close()

    def stop(self) -> None:
        """Stop, and wait for it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


class FleetCommand:
    """``nerite rollout start --fleet``, as a process."""

    def __init__(self, words: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as sink:
            self.process = start_program([NERITE, "rollout", *words], sink)

    @property
    def text(self) -> str:
        """All that it has said."""
        return self._log.read_text()

    def kill(self) -> None:
        """End it at once."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self) -> int:
        """Return its exit status."""
        return self.process.wait(PATIENCE)


class Cluster:
    """The replicas, and the Prometheus that reads them."""

    def __init__(self, folder: Path, replicas: list[Replica], prometheus: Prometheus) -> None:
        self.folder = folder
        self.replicas = replicas
        self.prometheus = prometheus


class FleetModel:
    """A model on all replicas, and its rollout."""

    def __init__(self, cluster: Cluster, name: str, candidate: str) -> None:
        """``candidate`` is the source of version 2."""
        self.name = name
        self.replicas = cluster.replicas
        self._cluster = cluster
        self._commands: list[FleetCommand] = []
        for replica in self.replicas:
            replica.add(name, candidate)

    def start(self, *words: str) -> FleetCommand:
        """Start the command with these options."""
        replicas = [word for replica in self.replicas for word in ("--replica", replica.url)]
        prometheus = self._cluster.prometheus.url
        always = ["start", self.name, "--from", "1", "--to", "2", "--fleet", "--prometheus", prometheus]
        return self.command([*always, *replicas, "--interval", "0.3", *words])

    def command(self, words: list[str]) -> FleetCommand:
        """Start the command ``nerite rollout`` with these words."""
        command = FleetCommand(words, self._cluster.folder / f"{self.name}.log")
        self._commands.append(command)
        return command

    def statuses(self) -> list[dict[str, Any]]:
        """Return what each replica says."""
        return [replica.status(self.name) for replica in self.replicas]

    def served(self) -> list[float]:
        """Return what the model adds on each replica."""
        return [replica.served(self.name) for replica in self.replicas]

    def eventually(self, state: str, weight: float | None = None) -> None:
        """Wait until every replica is in a state."""

        def there() -> bool:
            found = self.statuses()
            return all(each.get("state") == state and weight in (None, each["weight"]) for each in found)

        eventually(there, what=f"not all are {state}")

    def close(self) -> None:
        """End the commands."""
        for command in self._commands:
            if command.process.poll() is None:
                command.kill()


@contextmanager
def cluster(folder: Path, count: int = 3, rules: Path | None = None) -> Iterator[Cluster]:
    """Run replicas and their Prometheus, which evaluates ``rules``."""
    require("prometheus")
    ports = free_ports(2 * count)
    with ExitStack() as stack:
        with ThreadPoolExecutor(count) as executor:
            starting = [
                executor.submit(Replica, folder / f"replica{number}", ports[2 * number : 2 * number + 2])
                for number in range(count)
            ]
        replicas = []
        for each in starting:
            replicas.append(each.result())
            stack.callback(replicas[-1].close)
        targets = [f"localhost:{replica.metrics_port}" for replica in replicas]
        prometheus = stack.enter_context(prometheus_server(folder, targets, rules))
        yield Cluster(folder, replicas, prometheus)


@contextmanager
def clients(model: FleetModel) -> Iterator[Clients]:
    """Send requests to a model on all replicas meanwhile."""
    made = Clients(model.replicas, model.name)
    try:
        yield made
    finally:
        made.stop()
