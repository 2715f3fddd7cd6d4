"""Everything that a scheduler does, at once, on one server: nobody is forgotten, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import Serving, eventually, pbtxt, python_model, serving

SECONDS = 15.0
LIMITED = 'instance_group [{ kind: KIND_CPU count: 2 rate_limiter { resources [{ name: "R" count: 1 }] } }]'
SUMS = """
def initialize(self, args):
    self.sums = {}

def execute(self, requests):
    time.sleep(0.001)
    responses = []
    for request in requests:
        of = request.correlation_id()
        value = float(request.inputs()[0].as_numpy()[0, 0])
        begins = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.sums[of] = value + (0 if begins or not of else self.sums[of])
        answer = np.array([[self.sums[of]]], np.float32)
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]))
    return responses
"""
TURNS = """
def initialize(self, args):
    self.left = {}

def execute(self, requests):
    time.sleep(0.001)
    responses = []
    for request in requests:
        value = float(request.inputs()[0].as_numpy()[0, 0])
        of = request.correlation_id()
        left = value if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START else self.left.get(of, 0)
        self.left[of] = left - 1
        if left > 1:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            responses.append(None)
        else:
            answer = np.array([[value]], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]))
    return responses
"""
SLEEPY = """
def execute(self, requests):
    time.sleep(0.002)
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
        for request in requests
    ]
"""


def grouped(count: int) -> str:
    """The configuration of ``plain`` with so many instances."""
    return pbtxt(batch=4).replace("KIND_CPU", f"KIND_CPU count: {count}")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    two = "sequence_batching { %s }"
    python_model(folder, "plain", SLEEPY, grouped(2))
    python_model(folder, "other", SLEEPY, pbtxt(batch=4))
    python_model(folder, "single", SLEEPY, pbtxt(batch=0, more=""))
    python_model(folder, "cached", SLEEPY, pbtxt(more="dynamic_batching {} response_cache { enable: true }"))
    python_model(folder, "turns", TURNS, pbtxt(batch=3, more=two % "iterative_sequence: true"))
    python_model(folder, "direct", SUMS, pbtxt(batch=3, more=two % "direct {}").replace("_CPU", "_CPU count: 2"))
    python_model(folder, "oldest", SUMS, pbtxt(batch=3, more=two % "oldest { max_candidate_sequences: 3 }"))
    for name, source, text in (
        ("limited", SLEEPY, pbtxt(batch=2)),
        ("rationed", SUMS, pbtxt(batch=1, more=two % "direct {}")),  # with a slot on each instance: others wait
    ):
        python_model(folder, name, source, text.replace("instance_group [{ kind: KIND_CPU }]", LIMITED))
    return folder


class Ledger:
    """What clients asked, and what became of it, by model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.unsure: Counter[str] = Counter()
        """Requests that may never have come to the model, or that count nowhere: as their senders were mistaken."""
        self.wrong: list[str] = []

    def note(self, model: str, *, answered: bool = False, unsure: bool = False) -> None:
        with self.lock:
            self.asked[model] += 1
            self.answered[model] += answered
            self.unsure[model] += unsure

    def complain(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)


class Client:
    """Asks one after the other, and insists on one answer to each."""

    def __init__(self, server: Serving, ledger: Ledger, seed: int) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.server = server
        self.ledger = ledger
        self.random = random.Random(seed)
        self.number = 1000 * (seed + 1)

    def ask(self, model: str, value: float, *, give_up: float | None = None, **options: Any) -> float | None:
        """Return the answer, None for an error. ``give_up``: the client cancels after so many seconds."""
        shape = [1] if model == "single" else [1, 1]
        tensor = grpcclient.InferInput("INPUT0", shape, "FP32")
        tensor.set_data_from_numpy(np.full(shape, value, np.float32))
        answers: Queue[tuple[Any, Any]] = Queue()
        call = self.client.async_infer(model, [tensor], lambda result, error: answers.put((result, error)), **options)
        if give_up is not None:
            time.sleep(give_up)
            call.cancel()
        result, error = answers.get(timeout=30)
        said = "" if error is None else str(error)
        own = give_up is not None or "client_timeout" in options
        self.ledger.note(model, answered=error is None, unsure=own or "START" in said)
        expected = ("not healthy", "START flag", "being unloaded") + (
            ("Cancelled", "CANCELLED", "Deadline") if own else ()
        )
        if said and not any(part in said for part in expected):
            self.ledger.complain(f"{model}: {said}")
        return None if error is not None else float(result.as_numpy("OUTPUT0").reshape(-1)[0])

    def same(self, model: str, **options: Any) -> None:
        """The answer is what was asked."""
        value = float(self.random.randrange(2, 12))
        answer = self.ask(model, value, **options)
        if answer not in (value, None):
            self.ledger.complain(f"{model}: {answer} instead of {value}")

    def sequence(self, model: str, **options: Any) -> None:
        """The answers are the sums of what was asked so far, until one of them is an error."""
        self.number += 1
        expected, length = 0.0, self.random.randrange(1, 8)
        for place in range(length):
            expected += place
            flags = {"sequence_start": place == 0, "sequence_end": place == length - 1}
            answer = self.ask(model, place, sequence_id=self.number, **flags, **options)
            if answer is None:
                return
            if answer != expected:
                self.ledger.complain(f"{model}: {answer} instead of {expected}")

    def leave(self, model: str) -> None:
        """Send a request over HTTP, and do not wait for the answer."""
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [3.0]}
        self.number += 1
        flags = {"sequence_id": self.number, "sequence_start": True}
        body = json.dumps({"inputs": [tensor], "parameters": flags if model in ("direct", "oldest") else {}}).encode()
        with socket.create_connection(("127.0.0.1", self.server.ports["HTTPService"])) as connection:
            head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(self.random.random() * 0.01)
        self.ledger.note(model, unsure=True)

    def close(self) -> None:
        self.client.close()


def behaviours() -> list[Callable[[Client], None]]:
    """What clients do, each for itself."""
    same = [lambda client, model=model: client.same(model) for model in ("plain", "other", "single", "cached", "turns")]
    some = ("direct", "oldest", "rationed")
    sequences = [lambda client, model=model: client.sequence(model) for model in some]
    return [
        *same,
        *same,
        *sequences,
        *sequences,
        lambda client: client.sequence("rationed"),
        lambda client: client.same("limited"),
        lambda client: client.same("limited", priority=1),
        lambda client: client.same(client.random.choice(ALL), give_up=client.random.random() * 0.01),
        lambda client: client.sequence(client.random.choice(some), give_up=client.random.random() * 0.01),
        lambda client: client.same("turns", client_timeout=0.005 + client.random.random() * 0.01),
        lambda client: client.leave(client.random.choice(("plain", "cached", "turns", "direct", "oldest", "limited"))),
    ]


ALL = ("plain", "other", "single", "cached", "turns", "limited")


def descriptors(server: Serving) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def threads(server: Serving) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def work(server: Serving, ledger: Ledger, seconds: float) -> Iterator[None]:
    """Have all clients at work; yield for as long as they are."""
    end = time.monotonic() + seconds

    def run(number: int, behave: Callable[[Client], None]) -> None:
        client = Client(server, ledger, number)
        try:
            while time.monotonic() < end:
                behave(client)
        except Exception as error:  # whatever it is, the test is to tell of it
            ledger.complain(f"{number}: {error!r}")
        finally:
            client.close()

    clients = [threading.Thread(target=run, args=each) for each in enumerate(behaviours())]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        yield
    for client in clients:
        client.join()


def kill(server: Serving, prefix: str) -> None:
    name, pid = next((name, pid) for name, pid in server.workers().items() if name.startswith(prefix))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.workers().get(name, pid) != pid, what=f"{name} did not come back")


@pytest.mark.timeout(180)
def test_everything_at_once(models: Path, tmp_path: Path) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=*", "--cache-config=local,size=1048576"]
    with serving(models, tmp_path / "log", "--rate-limit=execution_count", *flags) as server:
        ledger = Ledger()
        for _ in work(server, ledger, 1.0):
            time.sleep(0.05)
        before = threads(server)
        open_before = descriptors(server)
        began = time.monotonic()
        deeds = [
            lambda: kill(server, "direct"),
            lambda: change(server, models, 3),
            lambda: reload(server, models),
            lambda: kill(server, "plain"),
            lambda: change(server, models, 1),
            lambda: kill(server, "rationed"),
            lambda: change(server, models, 2),
        ]
        moments = [SECONDS * (place + 1) / (len(deeds) + 2) for place in range(len(deeds))]
        for _ in work(server, ledger, SECONDS):
            if moments and time.monotonic() - began > moments[0]:
                moments.pop(0)
                deeds.pop(0)()
            time.sleep(0.02)
        while deeds:  # a slow machine needs longer
            for _ in work(server, ledger, 1.0):
                if deeds:
                    deeds.pop(0)()
                time.sleep(0.02)
        assert ledger.wrong == []
        metrics = server.metrics
        eventually(lambda: not any(v for k, v in metrics().items() if k.startswith("nv_inference_pending")))
        for model in ledger.asked:
            eventually(
                lambda model=model: counts(server, ledger, model), what=f"{model}: {told(server, ledger, model)}"
            )
        eventually(lambda: threads(server) <= before, what=f"{threads(server)} threads, not {before}")
        eventually(lambda: descriptors(server) <= open_before, what=f"{descriptors(server)} files, not {open_before}")
        errors = [line for line in server.text.splitlines() if re.match(r"E\d{4}", line)]
        assert [line for line in errors if not re.search(r"worker '\w+' \(pid \d+\) died: .*SIGKILL", line)] == []
        assert len(errors) == 3


def statistics(server: Serving, model: str) -> tuple[int, int]:
    """Requests that succeeded, and that failed."""
    of = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]["inference_stats"]
    return of["success"]["count"], of["fail"]["count"]


def counts(server: Serving, ledger: Ledger, model: str) -> bool:
    """Whether the server has counted what its clients have. The model that is loaded anew counts from then on."""
    succeeded, failed = statistics(server, model)
    asked = ledger.asked[model]
    if model == "other":
        return 0 < succeeded <= asked
    return asked - ledger.unsure[model] <= succeeded + failed <= asked and succeeded >= ledger.answered[model]


def told(server: Serving, ledger: Ledger, model: str) -> str:
    said = f"{ledger.asked[model]} asked, {ledger.unsure[model]} unsure, {ledger.answered[model]} answered"
    return f"{said}; succeeded and failed {statistics(server, model)}"


def change(server: Serving, models: Path, count: int) -> None:
    """Have the model ``plain`` run in another number of instances."""
    (models / "plain" / "config.pbtxt").write_text(grouped(count))
    assert server.ask("POST", "/v2/repository/models/plain/load")[0] == 200


def reload(server: Serving, models: Path) -> None:
    """Load the model ``other`` anew, with another file."""
    with (models / "other" / "1" / "model.py").open("a") as file:
        file.write("\n# Another one.\n")
    assert server.ask("POST", "/v2/repository/models/other/load")[0] == 200
