"""The metrics equal the client's own count, to the last request, whatever became of it.

3,000 requests unless ``COUNTED_REQUESTS`` says otherwise: ``make soak`` sends 100,000.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest
from counted_load import CONFIG, MODEL, Client

from serving import Serving, eventually, pbtxt, python_model, serving

REQUESTS = int(os.environ.get("COUNTED_REQUESTS", "3000"))
ROUNDS = 5
"""After each but the last the model is reloaded, and its counts begin anew."""
COARSE = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
STAGES = ("queue", "input", "compute", "output")
REASONS = ("queue_full", "queue_timeout", "not_let_in", "cancelled", "model_error", "worker_died", "other")


def of_reason(model: str, why: str) -> str:
    """Return the labels of what is counted by reason."""
    return f'model="{model}",reason="{why}",version="1"'


def counted(server: Serving, model: str) -> Counter[str]:
    """Return what the server has counted of a model since its load."""
    page = server.metrics()
    of = f'model="{model}",version="1"'
    found = Counter({why: int(page[f"nerite_request_failures_total{{{of_reason(model, why)}}}"]) for why in REASONS})
    found["success"] = int(page[f"nv_inference_request_success{{{of}}}"])
    return found


def settle(server: Serving, model: str, total: int) -> None:
    """Wait until the server has counted ``total`` requests: those that nobody waits for may be on their way."""
    eventually(lambda: counted(server, model).total() >= total)
    found = counted(server, model)
    assert found.total() == total
    page, of = server.metrics(), f'model="{model}",version="1"'
    # What is counted twice is counted alike.
    failures = sum(page[f"nv_inference_request_failure{{{of_reason(model, why)}}}"] for why in COARSE)
    assert failures == found.total() - found["success"]
    if found["success"]:
        whole = page[f"nerite_request_duration_seconds_count{{{of}}}"]
        stages = [
            page[f'nerite_stage_duration_seconds_count{{model="{model}",stage="{stage}",version="1"}}']
            for stage in STAGES
        ]
        assert {found["success"]} == {whole, *stages, page[f"nv_inference_count{{{of}}}"]}
    executions = page[f"nv_inference_exec_count{{{of}}}"]
    released = sum(
        value for name, value in page.items() if name.startswith(f'nerite_batch_releases_total{{model="{model}"')
    )
    assert executions == released == found["success"] + found["model_error"] + found["worker_died"]


@pytest.mark.timeout(120 + REQUESTS // 100)
def test_the_metrics_equal_the_count_of_the_client(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("mixed", "steady"):
        python_model(models, name, MODEL, pbtxt(batch=1, more=CONFIG))
    flags = ("--model-control-mode=explicit", "--load-model=*", "--log-error=false", "--log-warning=false")
    with serving(models, tmp_path / "log", *flags) as server:
        clients = {name: Client(name, server.http, server.grpc, seed) for seed, name in enumerate(("mixed", "steady"))}

        async def one_round() -> None:
            await asyncio.gather(*(client.send(REQUESTS // ROUNDS // 2) for client in clients.values()))

        told: Counter[str] = Counter()
        for number in range(ROUNDS):
            asyncio.run(one_round())
            settle(server, "mixed", clients["mixed"].counted.total() - told.total())
            told += counted(server, "mixed")
            if number < ROUNDS - 1:
                (models / "mixed" / "1" / "model.py").touch()
                assert server.ask("POST", "/v2/repository/models/mixed/load", b"{}")[0] == 200
                assert counted(server, "mixed").total() == 0, "it was loaded anew"
        settle(server, "steady", clients["steady"].counted.total())
        for name, found in (("mixed", told), ("steady", counted(server, "steady"))):
            right = clients[name].counted
            assert right.total() == REQUESTS // 2
            hung_up = right.pop("hung_up")
            assert (
                min(hung_up, *(right[kind] for kind in ("success", "model_error", "queue_timeout", "queue_full"))) > 0
            )
            # Whoever hangs up does not know what became of the request, but each of them is counted once.
            assert right - found == Counter()
            assert (found - right).total() == hung_up
            assert (found - right).keys() <= {"success", "cancelled", "queue_full"}
