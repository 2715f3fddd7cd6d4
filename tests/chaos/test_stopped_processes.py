"""Processes that stand still (SIGSTOP): whoever has nothing to do with them goes on, and so do they with SIGCONT."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from faults import LONGEST, Bystanders, tensor_memory
from serving import HELD, IDENTITY, PATIENCE, Serving, binary_request, eventually, let_go, pbtxt, python_model, serving

ONE = pbtxt(batch=1, more="")
CHECKED = """
def is_ready(self):
    return True
"""
PATIENT = """
def execute(self, requests):
    while not requests[0].is_cancelled():
        time.sleep(0.001)
    print("cancelled", flush=True)
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""
LARGE = np.arange(2_000_000, dtype=np.float32).reshape(1, -1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "held", HELD, ONE)
    python_model(models, "checked", IDENTITY + CHECKED, ONE)
    python_model(models, "other", IDENTITY)
    python_model(models, "patient", PATIENT, ONE)
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


def template_of(server: Serving) -> int:
    pid = server.workers()["other_0_0"]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Have processes stand still in the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def ask_large(server: Serving, model: str) -> bool:
    """Ask with a large tensor; return whether it comes back."""
    body, headers = binary_request(LARGE)
    status, _, answer = server.ask("POST", f"/v2/models/{model}/infer", body, **headers)
    return status == 200 and answer.endswith(LARGE.tobytes())


@pytest.mark.parametrize("at_work", [False, True])
def test_a_worker(server: Serving, tmp_path: Path, at_work: bool) -> None:
    """What it has, and what waits for it, is answered when it goes on: its first large request, too."""
    pending = 'nv_inference_pending_request_count{model="held",version="1"}'
    with Bystanders(server), ThreadPoolExecutor(5) as callers:
        asked = [(-1.0, callers.submit(server.infer, "held", [-1.0]))] if at_work else []
        if at_work:
            eventually(lambda: "executes -1" in server.text)
        with stopped(server.workers()["held_0_0"]):
            asked += [(value, callers.submit(server.infer, "held", [value])) for value in (1.0, 2.0)]
            large = callers.submit(ask_large, server, "held")
            eventually(lambda: server.metrics()[pending] == 2 + at_work)
            assert server.ready(), "a model that takes long is ready"
        let_go(tmp_path / "models" / "held")
        assert [each.result(PATIENCE) for _, each in asked] == [[value] for value, _ in asked]
        assert large.result(PATIENCE)


def test_a_request_that_is_cancelled_before_its_worker_has_read_it(server: Serving) -> None:
    """The worker reads the batch and the cancellation in one piece; the model hears of it all the same."""
    given_up = 'nerite_requests_given_up_total{model="patient",reason="disconnected",version="1"}'
    pending = 'nv_inference_pending_request_count{model="patient",version="1"}'
    host, port = server.http.split(":")
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    head = b"POST /v2/models/patient/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with stopped(server.workers()["patient_0_0"]):
        with (
            socket.create_connection((host, int(port))) as client,
            socket.create_connection((host, int(port))) as behind,
        ):
            client.sendall(head + body)
            behind.sendall(head + body)
            eventually(lambda: server.metrics()[pending] == 1)
        eventually(lambda: server.metrics().get(given_up) == 2)
    eventually(lambda: "cancelled" in server.text)


@pytest.mark.timeout(180)
def test_much_that_waits_for_a_worker(server: Serving) -> None:
    """The memory of large requests goes back to the system some seconds after they were answered."""
    count = 40
    pending = 'nv_inference_pending_request_count{model="held",version="1"}'
    with Bystanders(server), ThreadPoolExecutor(count) as callers:
        with stopped(server.workers()["held_0_0"]):
            asked = [callers.submit(ask_large, server, "held") for _ in range(count)]
            eventually(lambda: server.metrics()[pending] == count - 1)
            assert tensor_memory(server) >= count * LARGE.nbytes
        assert all(each.result(PATIENCE) for each in asked)
        # Also where some of it is used all the while.
        over = threading.Event()
        asking = callers.submit(lambda: [ask_large(server, "held") for _ in iter(lambda: over.wait(0.02), True)])
        eventually(lambda: tensor_memory(server) < 0.2 * count * LARGE.nbytes)
        over.set()
        assert all(asking.result(PATIENCE))
        eventually(lambda: tensor_memory(server) == 0, what="neither the server's nor the worker's is kept")


def test_a_worker_that_is_asked_whether_it_is_ready(server: Serving) -> None:
    with Bystanders(server):
        with stopped(server.workers()["checked_0_0"]):
            began = time.monotonic()
            server.ready("checked")
            assert time.monotonic() - began < LONGEST
            eventually(lambda: not server.ready("checked"))
            assert not server.ready()
            assert server.ready("other")
        eventually(server.ready)
        assert server.infer("checked", [1.0]) == [1.0]


def test_the_template(server: Serving, tmp_path: Path) -> None:
    """Loads, and workers that have died, wait for it; nothing else does."""
    python_model(tmp_path / "models", "new", IDENTITY)
    with Bystanders(server), ThreadPoolExecutor(3) as callers:
        asked = callers.submit(server.infer, "held", [-1.0])
        eventually(lambda: "executes -1" in server.text)
        with stopped(template_of(server)):
            loading = callers.submit(server.ask, "POST", "/v2/repository/models/new/load")
            eventually(lambda: server.state("new") == "LOADING")
            os.kill(server.workers()["held_0_0"], signal.SIGKILL)
            with pytest.raises(RuntimeError, match="Stub process 'held_0_0' is not healthy"):
                asked.result(PATIENCE)
            waiting = callers.submit(server.infer, "held", [1.0])
            assert not server.ready("held")
            assert server.ready("other")
        assert loading.result(PATIENCE)[0] == 200
        assert waiting.result(PATIENCE) == [1.0]
        assert server.infer("new", [1.0]) == [1.0]


def test_an_unload_and_the_end_of_the_server(server: Serving) -> None:
    workers = server.workers()
    for pid in (template_of(server), workers["held_0_0"], workers["other_0_0"]):
        os.kill(pid, signal.SIGSTOP)
    assert server.ask("POST", "/v2/repository/models/held/unload")[0] == 200
    assert server.state("held") in ("UNLOADING", "UNAVAILABLE")
    assert server.infer("checked", [1.0]) == [1.0]
    assert server.stop() == 0
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers.values()))
