"""A worker that dies takes down what it was doing, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from faults import FRONTS, Bystanders, descriptors, files_in
from serving import HELD, IDENTITY, PATIENCE, Serving, binary_request, eventually, pbtxt, python_model, serving

DEATHS = {
    1.0: ("exit", "exited with status 7"),
    2.0: ("kill", "SIGKILL"),
    3.0: ("segfault", "SIGSEGV"),
}
MORTAL = """
def execute(self, requests):
    import ctypes
    for request in requests:
        how = float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1)[0])
        if how == 1.0:
            os._exit(7)
        if how == 2.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == 3.0:
            ctypes.string_at(0)
        if how == 4.0:
            print("executes on", flush=True)
            time.sleep(1000)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "mortal", MORTAL, pbtxt(batch=1, more=""))
    python_model(models, "other", IDENTITY)
    return models


def restarts(server: Serving) -> int:
    """How often a worker was started again, as the metrics have it."""
    samples = server.metrics().items()
    return int(sum(value for name, value in samples if name.startswith("nerite_worker_restarts_total")))


@pytest.mark.parametrize("how", sorted(DEATHS))
def test_death_while_executing(repository: Path, tmp_path: Path, how: float) -> None:
    with serving(repository, tmp_path / "log") as server:
        before = server.workers()
        with pytest.raises(RuntimeError, match="Stub process 'mortal_0_0' is not healthy") as refusal:
            server.infer("mortal", [how])
        assert DEATHS[how][1] in str(refusal.value)
        assert str(refusal.value).startswith("500")
        assert server.infer("other", [4.0]) == [4.0]
        eventually(lambda: server.ready("mortal"))
        assert server.infer("mortal", [5.0]) == [5.0]
        after = server.workers()
        assert after["other_0_0"] == before["other_0_0"]
        assert after["mortal_0_0"] != before["mortal_0_0"]
        stats = server.json("GET", "/v2/models/mortal/stats")["model_stats"][0]["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"]) == (1, 1)
        assert server.metrics()['nv_inference_request_failure{model="mortal",reason="BACKEND",version="1"}'] == 1


def test_death_in_the_first_large_request(tmp_path: Path) -> None:
    """And in later ones: what it had is answered, and nothing of it is left."""
    python_model(tmp_path / "models", "held", HELD, pbtxt(batch=1, more=""))
    python_model(tmp_path / "models", "other", IDENTITY)
    large = np.full((1, 2_000_000), -1, np.float32)
    counts = []
    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(1) as callers:
        for number in range(1, 4):
            body, headers = binary_request(large)
            with Bystanders(server):
                asked = callers.submit(lambda body=body, headers=headers: ask(server, body, headers))
                eventually(lambda number=number: server.text.count("executes -1") == number)
                os.kill(server.workers()["held_0_0"], signal.SIGKILL)
                status, error = asked.result(PATIENCE)
            assert status == 500
            assert b"Stub process 'held_0_0' is not healthy" in error
            assert ask(server, *binary_request(-large))[0] == 200
            counts.append(descriptors(server))
            assert files_in("/dev/shm", server) == []
        assert len(counts[0]) == len(counts[-1]), "as many processes as before"
        eventually(lambda: sum(descriptors(server).values()) <= sum(counts[0].values()) + 4 * (FRONTS - 1))


def ask(server: Serving, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    status, _, answer = server.ask("POST", "/v2/models/held/infer", body, **headers)
    return status, answer


def test_death_while_idle(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        for number in range(1, 4):
            os.kill(server.workers()["mortal_0_0"], signal.SIGKILL)
            eventually(lambda number=number: restarts(server) == number)
            assert server.infer("mortal", [5.0]) == [5.0]


def test_what_waits_is_answered_after_the_restart(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        outcomes: dict[float, str] = {}

        def call(value: float) -> None:
            try:
                outcomes[value] = str(server.infer("mortal", [value]))
            except RuntimeError as error:
                outcomes[value] = str(error)

        callers = [threading.Thread(target=call, args=(value,)) for value in (4.0, 5.0, 6.0)]
        callers[0].start()
        pending = 'nv_inference_pending_request_count{model="mortal",version="1"}'
        eventually(lambda: "executes on" in server.text)
        for caller in callers[1:]:
            caller.start()
        eventually(lambda: server.metrics()[pending] == 2)
        os.kill(server.workers()["mortal_0_0"], signal.SIGKILL)
        for caller in callers:
            caller.join(PATIENCE)
        assert "not healthy" in outcomes[4.0]
        assert (outcomes[5.0], outcomes[6.0]) == ("[5.0]", "[6.0]")
        assert server.metrics()[pending] == 0


def test_a_model_that_cannot_come_back_refuses(tmp_path: Path) -> None:
    models = tmp_path / "models"
    flag = tmp_path / "started"
    once = f"""
def initialize(self, args):
    if os.path.exists({str(flag)!r}):
        raise RuntimeError("the licence server is gone")
    open({str(flag)!r}, "w").close()
"""
    python_model(models, "once", once + MORTAL, pbtxt(batch=1, more=""))
    with serving(models, tmp_path / "log") as server:
        os.kill(server.workers()["once_0_0"], signal.SIGKILL)
        eventually(lambda: "no new worker for" in server.text)
        assert not server.ready("once")
        assert not server.ready()
        with pytest.raises(RuntimeError, match=r"503.*no instance of the model can be started.*licence server"):
            server.infer("once", [5.0])
        flag.unlink()
        eventually(lambda: server.ready("once"))
        assert server.infer("once", [5.0]) == [5.0]


def test_the_server_takes_its_workers_along(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", clean=False) as server:
        workers = server.workers()
        assert sorted(workers) == ["mortal_0_0", "other_0_0"]
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers.values()))


def template_of(server: Serving) -> int:
    pid = server.workers()["mortal_0_0"]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_template_may_die(repository: Path, tmp_path: Path) -> None:
    """Again and again, also while it is to start workers: loads fail with the reason, or work."""
    # Front processes would end with the template, and with them the connections.
    flags = ("--model-control-mode=explicit", "--load-model=*", "--front-processes=1")
    with serving(repository, tmp_path / "log", *flags) as server, ThreadPoolExecutor(2) as callers:
        python_model(repository, "new", IDENTITY)
        for number in range(1, 5):
            running = callers.submit(server.infer, "mortal", [4.0])
            eventually(lambda number=number: server.text.count("executes on") == number)
            loading = callers.submit(server.ask, "POST", "/v2/repository/models/new/load")
            template = template_of(server)
            if number % 2:
                eventually(lambda: server.state("new") in ("LOADING", "READY"))
            os.kill(template, signal.SIGKILL)
            with pytest.raises(RuntimeError, match="Stub process 'mortal_0_0' is not healthy") as refusal:
                running.result(PATIENCE)
            assert f"the process that it was started by (pid {template}) has ended" in str(refusal.value)
            status, _, error = loading.result(PATIENCE)
            assert status == 200 or b"ended" in error, error
            eventually(lambda: restarts(server) >= 2, what="the workers come back under a new template")
            eventually(lambda: server.ready("mortal") and server.ready("other"))
            assert server.infer("mortal", [5.0]) == [5.0]
            assert server.infer("other", [5.0]) == [5.0]
            assert server.ask("POST", "/v2/repository/models/new/unload")[0] == 200
            eventually(lambda: server.state("new") in ("UNAVAILABLE", ""))
        open_files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        os.kill(template_of(server), signal.SIGKILL)
        eventually(lambda: server.ready("mortal") and server.ready("other"))
        eventually(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) <= open_files)
