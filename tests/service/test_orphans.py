"""What a model has started ends with its worker: when it is unloaded, when it dies, when the server stops or dies."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_family import lives, processes_of
from serving import Serving, eventually, python_model, serving

STARTS = """
def execute(self, requests):
    import subprocess
    sleep = ["sleep", "300"]
    stubborn = "trap '' TERM; echo $$ > {folder}/stubborn; sleep 300 & wait; sleep 300"
    children = {{
        "plain": subprocess.Popen(sleep),
        "session": subprocess.Popen(sleep, start_new_session=True),
        "group": subprocess.Popen(sleep, process_group=0),
        # Their parents end at once.
        "orphan": subprocess.Popen(["sh", "-c", "sleep 300 & echo $! > {folder}/orphan"]),
        "daemon": subprocess.Popen(["sh", "-c", "setsid sleep 300 & echo $! > {folder}/daemon"]),
        "stubborn": subprocess.Popen(["sh", "-c", stubborn], start_new_session=True),
    }}
    for name in ("orphan", "daemon"):
        children.pop(name).wait()
    if os.fork() == 0:
        open("{folder}/forked", "w").write(str(os.getpid()))
        while True:
            time.sleep(60)
    for name, child in children.items():
        open(f"{folder}/{{name}}", "w").write(str(child.pid))
    # What has not written yet would not live to do so where this process ends.
    files = [f"{folder}/{{name}}" for name in {kinds}]
    while not all(os.path.exists(each) and os.path.getsize(each) for each in files):
        time.sleep(0.001)
    {last}
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))]) for _ in requests]
"""
KINDS = ("plain", "session", "group", "orphan", "daemon", "stubborn", "forked")


def start(folder: Path, name: str, last: str = "") -> None:
    """Write a model that starts processes when it is asked."""
    (folder / name).mkdir()
    python_model(folder / "models", name, STARTS.format(folder=folder / name, last=last, kinds=KINDS))


def started(server: Serving, folder: Path, name: str) -> dict[str, int]:
    """Have a model start its processes; return them."""
    status, _, answer = server.ask(
        "POST",
        f"/v2/models/{name}/infer",
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]},
    )
    assert status == 200 or b"ended" in answer or b"exited" in answer, answer
    for kind in KINDS:
        # A shell makes the file before it writes to it.
        eventually(lambda kind=kind: (folder / name / kind).exists() and (folder / name / kind).stat().st_size > 0)
    found = {kind: int((folder / name / kind).read_text()) for kind in KINDS}
    assert len(set(found.values())) == len(KINDS)
    return found


def gone(processes: dict[str, int]) -> bool:
    return not any(map(lives, processes.values()))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    start(tmp_path, "one")
    start(tmp_path, "other")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with serving(tmp_path / "models", tmp_path / "log", *flags, clean=False) as running:
        yield running


def test_an_unload_and_the_end_of_the_server(server: Serving, tmp_path: Path) -> None:
    one, other = started(server, tmp_path, "one"), started(server, tmp_path, "other")
    assert all(map(lives, [*one.values(), *other.values()]))
    assert server.ask("POST", "/v2/repository/models/one/unload")[0] == 200
    eventually(lambda: gone(one))
    # Those of a model that is still there are left alone.
    assert all(map(lives, other.values()))
    assert server.stop() == 0
    assert gone(other), "the server ends after them"


def test_a_worker_that_is_killed(server: Serving, tmp_path: Path) -> None:
    one, other = started(server, tmp_path, "one"), started(server, tmp_path, "other")
    workers = server.workers()
    os.kill(next(pid for name, pid in workers.items() if name.startswith("one")), signal.SIGKILL)
    eventually(lambda: gone(one))
    assert all(map(lives, other.values()))
    eventually(lambda: server.ready("one"))
    again = started(server, tmp_path, "one")
    assert server.stop() == 0
    assert gone(other) and gone(again)


def test_the_process_that_starts_workers_is_killed(server: Serving, tmp_path: Path) -> None:
    one = started(server, tmp_path, "one")
    worker = server.workers()["one_0_0"]
    os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    eventually(lambda: gone(one))

    def ready() -> bool:
        with contextlib.suppress(ConnectionError):  # front processes have ended, too
            return server.ready("one")
        return False

    eventually(ready)


def test_a_server_that_is_killed(server: Serving, tmp_path: Path) -> None:
    one = started(server, tmp_path, "one")
    workers = server.workers()
    server.process.kill()
    server.process.wait()
    eventually(lambda: gone({**one, **workers}))


def test_a_model_that_ends_its_process(tmp_path: Path) -> None:
    start(tmp_path, "brief", "os._exit(3)")
    with serving(tmp_path / "models", tmp_path / "log") as server:
        brief = started(server, tmp_path, "brief")
        eventually(lambda: gone(brief))


def test_orphans_that_end_by_themselves_leave_nothing(tmp_path: Path) -> None:
    ends = """
def execute(self, requests):
    import subprocess
    subprocess.run(["sh", "-c", "true & setsid true & exit 0"])
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))]) for _ in requests]
"""
    python_model(tmp_path / "models", "ends", ends)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        (worker,) = server.workers().values()
        template = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        before = processes_of(template)
        assert worker in before
        for _ in range(5):
            server.infer("ends", [1.0])
        eventually(lambda: processes_of(template) == before)
