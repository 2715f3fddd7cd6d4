"""Helper processes that are killed, or stand still, while they have a request: that one fails, the next is answered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import pytest

from process_family import helpers_of
from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

COUNT = 200_000
BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, COUNT], "data": [0.5] * COUNT}]}
).encode()
INFER = "/v2/models/within/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("helpers")
    python_model(folder / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with serving(folder / "models", folder / "log") as running:
        yield running


def answered(server: Serving) -> None:
    status, _, said = server.ask("POST", INFER, BODY)
    assert (status, len(json.loads(said)["outputs"][0]["data"])) == (200, COUNT)


def stopped(server: Serving) -> int:
    """Return the one helper that there is, which stands still now, and will have the next request."""
    answered(server)
    (helper,) = helpers_of(server.process.pid)
    os.kill(helper, signal.SIGSTOP)
    return helper


def test_one_that_is_killed_fails_the_request_that_it_reads(server: Serving) -> None:
    helper = stopped(server)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.ask, "POST", INFER, BODY) for _ in range(2)]
        # One is answered by another process, which is started as the first is busy.
        eventually(lambda: [each.done() for each in asked].count(True) == 1)
        os.kill(helper, signal.SIGKILL)
        (good, _, _), (status, _, said) = sorted((each.result() for each in asked), key=itemgetter(0))
    assert good == 200
    told = "reading the request failed, because its helper process is gone: it was ended by SIGKILL"
    assert (status, told in json.loads(said)["error"]) == (500, True), said
    eventually(lambda: helper not in helpers_of(server.process.pid))
    answered(server)


def test_one_that_stands_still_is_replaced(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with serving(tmp_path / "models", tmp_path / "log") as running:
        helper = stopped(running)
        # Each front has helpers of its own: the request may come to one whose helper goes on.
        asked = (running.ask("POST", INFER, BODY) for _ in range(20))
        status, _, said = next(each for each in asked if each[0] != 200)
        assert (status, "reading the request took more than 1" in json.loads(said)["error"]) == (503, True), said
        eventually(lambda: helper not in helpers_of(running.process.pid))
        answered(running)


def test_a_server_that_ends_does_not_wait_for_one_that_stands_still(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with serving(tmp_path / "models", tmp_path / "log") as running:
        helper = stopped(running)
        assert running.stop() == 0
    eventually(lambda: not Path(f"/proc/{helper}").exists())


def test_all_of_them_killed_at_any_time(server: Serving) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.ask, "POST", INFER, BODY) for _ in range(40)]
        while not all(each.done() for each in asked):
            for helper in helpers_of(server.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(helper, signal.SIGKILL)
    for each in asked:
        status, _, said = each.result()
        assert status == 200 or "because its helper process is gone" in json.loads(said)["error"]
    answered(server)
