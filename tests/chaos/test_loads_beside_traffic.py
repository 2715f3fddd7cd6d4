"""Loads and unloads without a pause, while clients ask: no answer of another model is lost, and none is wrong.

60 loads unless ``NERITE_TEST_LOADS`` says otherwise: ``make soak`` makes 1,000. What is left of thousands is measured
by ``benchmarks/churn.py``.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faults import FRONTS, Bystanders, descriptors
from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

LOADS = int(os.environ.get("NERITE_TEST_LOADS", "60"))
COMING_AND_GOING = ("worker", "inside")
REFUSALS = ("Request for unknown model: '{}' has no available versions", "Request for unknown model: '{}' is not found")


class Caller:
    """Asks a model that comes and goes, over HTTP and gRPC in turn, and notes what is neither right nor a refusal."""

    def __init__(self, server: Serving, model: str, over: threading.Event) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._model = model
        self._over = over
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with grpcclient.InferenceServerClient(self._server.grpc) as client:
            for number in itertools.count():
                if self._over.wait(0.002):
                    return
                value = float(number % 1_000)
                try:
                    answer = self._over_grpc(client, value) if number % 2 else self._server.infer(self._model, [value])
                except (RuntimeError, InferenceServerException) as error:
                    refused = any(refusal.format(self._model) in str(error) for refusal in REFUSALS)
                    self.outcomes["refused"] += 1
                    if not refused:
                        self.wrong.append(str(error))
                else:
                    self.outcomes["answered"] += 1
                    if answer != [value]:
                        self.wrong.append(f"{answer} instead of {value}")

    def _over_grpc(self, client: grpcclient.InferenceServerClient, value: float) -> list[float]:
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        found: list[float] = client.infer(self._model, [tensor]).as_numpy("OUTPUT0").reshape(-1).tolist()
        return found


@pytest.mark.timeout(120 + LOADS)
def test_loads_beside_traffic(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "other", IDENTITY)
    for name, config in zip(COMING_AND_GOING, (pbtxt(), pbtxt(parameters=IN_PROCESS)), strict=True):
        python_model(models, name, IDENTITY, config)
    flags = ("--model-control-mode=explicit", "--load-model=other")
    with serving(models, tmp_path / "log", *flags) as server:
        before = descriptors(server)
        over = threading.Event()
        callers = [Caller(server, name, over) for name in COMING_AND_GOING]
        with Bystanders(server) as bystanders:
            for caller in callers:
                caller.thread.start()
            for number in range(LOADS):
                name = COMING_AND_GOING[number % 2]
                answered = callers[number % 2].outcomes["answered"]
                assert server.ask("POST", f"/v2/repository/models/{name}/load")[0] == 200
                eventually(lambda number=number, most=answered: callers[number % 2].outcomes["answered"] > most)  # type: ignore[misc]  # bound now
                assert server.ask("POST", f"/v2/repository/models/{name}/unload")[0] == 200
            over.set()
            for caller in callers:
                caller.thread.join()
        assert [caller.wrong for caller in callers] == [[], []]
        assert all(caller.outcomes["refused"] for caller in callers)
        assert bystanders.answered > LOADS
        eventually(lambda: all(server.state(name) in ("", "UNAVAILABLE") for name in COMING_AND_GOING))
        eventually(lambda: descriptors(server).keys() <= before.keys(), what="workers are left")
        eventually(lambda: sum(descriptors(server).values()) <= sum(before.values()) + 5 * FRONTS)
        errors = {name: count for name, count in server.metrics().items() if name.startswith("nerite_internal_errors")}
        assert set(errors.values()) == {0}
