"""Readiness probes of a real server: answered at once, also while models are at work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from serving import HELD, IDENTITY, Serving, eventually, let_go, pbtxt, python_model, serving

CHECKED = """
def is_ready(self):
    return not os.path.exists(os.path.join(os.path.dirname(__file__), "unwell"))
"""
SLOW = """
async def is_ready(self):
    import asyncio
    await asyncio.sleep(0 if os.path.exists(os.path.join(os.path.dirname(__file__), "quick")) else 60)
    return True
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    root = tmp_path_factory.mktemp("ready")
    python_model(root / "models", "held", HELD, pbtxt(8, ""))
    python_model(root / "models", "checked", HELD + CHECKED, pbtxt(8, ""))
    python_model(root / "models", "slow", IDENTITY + SLOW, pbtxt(8, ""))
    (root / "models" / "slow" / "1" / "quick").touch()
    python_model(root / "models", "killed", IDENTITY + CHECKED, pbtxt(8, ""))
    with serving(root / "models", root / "log") as running:
        running.root = root  # type: ignore[attr-defined]
        yield running


def model(server: Serving, name: str) -> Path:
    directory: Path = server.root / "models" / name  # type: ignore[attr-defined]
    return directory


@pytest.mark.parametrize("name", ["held", "checked"])
def test_a_model_at_work_is_ready(server: Serving, name: str) -> None:
    eventually(lambda: server.ready(name))
    caller = threading.Thread(target=server.infer, args=(name, [-1.0]))
    before = server.text.count("executes -1.0")
    caller.start()
    try:
        eventually(lambda: server.text.count("executes -1.0") > before)
        # The batch ends when the probes have been answered, not before.
        assert server.ready(name)
        assert server.ready()
        assert server.ask("GET", "/v2/health/live")[0] == 200
        with grpc.InferenceServerClient(server.grpc) as client:
            assert client.is_model_ready(name)
            assert client.is_server_ready()
    finally:
        let_go(model(server, name))
        caller.join()


def test_a_model_says_itself_whether_it_can_serve(server: Serving) -> None:
    unwell = model(server, "checked") / "1" / "unwell"
    eventually(lambda: server.ready("checked"))
    unwell.touch()
    try:
        assert not server.ready("checked")
        assert not server.ready()
    finally:
        unwell.unlink()
    assert server.ready("checked")


def test_a_check_that_takes_long_is_answered_by_the_last_one(server: Serving) -> None:
    eventually(lambda: server.ready("slow"))
    quick = model(server, "slow") / "1" / "quick"
    quick.unlink()
    try:
        assert server.ready("slow"), "the check has not failed: it takes long"
    finally:
        quick.touch()


def test_the_first_probe_after_a_death_is_answered(server: Serving) -> None:
    eventually(lambda: server.ready("killed"))
    worker = server.workers()["killed_0_0"]
    # Stopped, it takes no question; then it dies with one.
    os.kill(worker, signal.SIGSTOP)
    answers: list[bool] = []
    probe = threading.Thread(target=lambda: answers.append(server.ready("killed")))
    probe.start()
    os.kill(worker, signal.SIGKILL)
    probe.join()
    assert len(answers) == 1
    eventually(lambda: server.ready("killed"))
    assert server.infer("killed", [1.0]) == [1.0]
