"""A server with a ledger: every request has a row, and the rows account for the time of the instances."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_llm import ENDLESS, FEW, NARROW, Stream

from llm_models import language_model
from nerite.ledger.tables import Equation, LedgerSchema, equations
from nerite.storage.database import Database
from serving import (
    ALL_TENANTS,
    HELD,
    IDENTITY,
    NERITE,
    Serving,
    ensemble,
    eventually,
    let_go,
    pbtxt,
    python_model,
    serving,
    step,
)

POLICY = """
[tenants.acme]
keys = ["acme-key"]
[tenants.other]
keys = ["other-key"]
concurrency = 1
"""
WORKS = """
def execute(self, requests):
    time.sleep(0.02)
    if any(pb_utils.get_input_tensor_by_name(each, "INPUT0").as_numpy()[0][0] == 13 for each in requests):
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""
CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        called = pb_utils.InferenceRequest(model_name="works", requested_output_names=["OUTPUT0"], inputs=[given])
        found = pb_utils.get_output_tensor_by_name(called.exec(), "OUTPUT0")
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", found.as_numpy())]))
    return answers
"""
SENDS = """
def execute(self, requests):
    import threading

    def send(request):
        time.sleep(0.01)
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)])
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    for request in requests:
        threading.Thread(target=send, args=(request,)).start()
"""
SHARED_WORKER = 'parameters { key: "WORKER" value: { string_value: "steps" } }'
CACHED = pbtxt(more="dynamic_batching {}\nresponse_cache { enable: true }")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ledger")
    models = made / "models"
    python_model(models, "works", WORKS)
    python_model(models, "calls", CALLS)
    python_model(models, "cached", IDENTITY, CACHED)
    python_model(models, "held", HELD)
    ensemble(models, "chain", step("cached", "INPUT0", "OUTPUT0"))
    (models / "talks").mkdir()
    language_model(models / "talks" / "1")
    (models / "talks" / "config.pbtxt").write_text(NARROW)
    (made / "policy.toml").write_text(POLICY)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    flags = ["--cache-config=local,size=1000000", "--model-control-mode=explicit", "--load-model=*"]
    policy = f"--policy-file={folder / 'policy.toml'}"
    ledger = f"--ledger={folder / 'ledger.db'}"
    with serving(folder / "models", folder / "log", ledger, policy, ALL_TENANTS, *flags) as running:
        yield running


def infer(server: Serving, model: str, value: float = 1.0, key: str = "acme-key") -> int:
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}
    return server.ask("POST", f"/v2/models/{model}/infer", body, authorization=f"Bearer {key}")[0]


def usage(server: Serving, *group_by: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return what was used so far, by the values of columns."""
    told = server.json("GET", f"/v2/usage?group_by={','.join(group_by)}")
    return {tuple(each[name] for name in group_by): each for each in told["data"]}


def added(server: Serving, before: dict[tuple[str, ...], dict[str, Any]], *group_by: str) -> dict[Any, dict[str, Any]]:
    found = {}
    for key, each in usage(server, *group_by).items():
        old = before.get(key, {})
        more = {name: value - old.get(name, 0) for name, value in each.items() if isinstance(value, int | float)}
        if more["requests"]:
            found[key] = more
    return found


def balance(server: Serving, ledger: Path) -> Equation:
    """Return the equation of all instances, as the tables have it now."""
    server.json("GET", "/v2/usage")
    return balance_of(ledger)


def balance_of(ledger: Path) -> Equation:
    database = Database(str(ledger), [LedgerSchema()])
    found = database.call(partial(equations, first_day=0, end_day=10**6))
    database.close()
    return Equation("all", *(sum(column) for column in list(zip(*found, strict=True))[1:]))


def test_each_request_has_a_row(server: Serving) -> None:
    by = ("tenant", "model", "ending")
    before = usage(server, *by)
    assert [infer(server, "works") for _ in range(3)] == [200] * 3
    assert infer(server, "works", key="other-key") == 200
    found = added(server, before, *by)
    assert found.keys() == {("acme", "works", "answered"), ("other", "works", "answered")}
    mine = found["acme", "works", "answered"]
    assert (mine["requests"], mine["prompt_tokens"]) == (3, 0)
    assert mine["compute_seconds"] >= 0.06


def test_a_step_and_a_call_are_charged_to_whoever_caused_them(server: Serving) -> None:
    by = ("tenant", "model", "origin")
    before = usage(server, *by)
    assert infer(server, "chain", 5.0) == infer(server, "calls", 5.0) == 200
    found = added(server, before, *by)
    assert {key: each["requests"] for key, each in found.items()} == {
        ("acme", "chain", "client"): 1,
        ("acme", "cached", "call"): 1,
        ("acme", "calls", "client"): 1,
        ("acme", "works", "call"): 1,
    }
    assert found["acme", "chain", "client"]["compute_seconds"] == 0


def test_an_answer_from_the_cache_costs_no_time(server: Serving) -> None:
    before = usage(server, "model", "ending")
    assert infer(server, "cached", 7.0) == infer(server, "cached", 7.0) == 200
    found = added(server, before, "model", "ending")
    assert found["cached", "cached"]["requests"] == found["cached", "answered"]["requests"] == 1
    assert found["cached", "cached"]["compute_seconds"] == 0


def test_a_request_that_is_not_admitted_was_refused(server: Serving, folder: Path) -> None:
    before = usage(server, "tenant", "model", "ending")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(infer, server, "held", -1.0, "other-key")
        eventually(lambda: server.metrics().get('nerite_admission_under_way{tenant="other"}') == 1)
        assert infer(server, "works", key="other-key") == 429
        let_go(folder / "models" / "held")
        assert held.result() == 200
    found = added(server, before, "tenant", "model", "ending")
    assert found["other", "works", "refused"]["requests"] == 1
    assert found["other", "works", "refused"]["compute_seconds"] == 0
    assert found["other", "held", "answered"]["compute_seconds"] > 0


def test_tokens_and_the_steps_of_an_engine(server: Serving) -> None:
    before = usage(server, "tenant", "model", "ending")
    body = {"text_input": "once", "sampling_parameters": json.dumps(FEW)}
    status, _, _ = server.ask("POST", "/v2/models/talks/generate", body, authorization="Bearer acme-key")
    assert status == 200
    (told,) = added(server, before, "tenant", "model", "ending").values()
    assert (told["requests"], told["prompt_tokens"], told["answer_tokens"]) == (1, 4, 8)
    assert told["prefill_seconds"] > 0 and told["decode_seconds"] > 0
    assert told["kv_block_seconds"] > 0
    assert told["compute_seconds"] == 0


def test_a_cancelled_stream_paid_for_its_tokens(server: Serving) -> None:
    before = usage(server, "model", "ending")
    stream = Stream(server, "talks", parameters=ENDLESS)
    assert "text_output" in stream.event()
    eventually(lambda: bool(added(server, before, "model", "ending").get(("talks", "running"))))
    stream.cut()
    eventually(lambda: bool(added(server, before, "model", "ending").get(("talks", "cancelled"))))
    told = added(server, before, "model", "ending")
    assert told.keys() == {("talks", "cancelled")}
    assert told["talks", "cancelled"]["answer_tokens"] > 0
    assert told["talks", "cancelled"]["decode_seconds"] > 0


def test_a_retry_with_the_same_key_costs_nothing(server: Serving) -> None:
    before = usage(server, "model", "ending")
    body = {"text_input": "once", "sampling_parameters": json.dumps(FEW)}
    for _ in range(2):
        status, _, _ = server.ask("POST", "/v2/models/talks/generate", body, idempotency_key="the same")
        assert status == 200
    found = added(server, before, "model", "ending")
    assert {key: each["requests"] for key, each in found.items()} == {
        ("talks", "answered"): 1,
        ("talks", "joined"): 1,
    }
    assert found["talks", "joined"]["answer_tokens"] == 0


def test_a_worker_that_dies_has_used_its_time(server: Serving) -> None:
    before = usage(server, "model", "ending")
    assert infer(server, "works", 13.0) == 500
    found = added(server, before, "model", "ending")
    assert found["works", "failed"]["compute_seconds"] >= 0.02
    eventually(lambda: infer(server, "works") == 200)


def test_a_tenant_sees_its_own_usage(server: Serving) -> None:
    assert infer(server, "works", key="other-key") == 200
    told = {}
    for name in ("acme", "other"):
        status, _, body = server.ask("GET", "/v1/usage?group_by=model", authorization=f"Bearer {name}-key")
        assert status == 200
        told[name] = {each["model"]: each["requests"] for each in json.loads(body)["data"]}
    everything = usage(server, "tenant", "model")
    for name, models in told.items():
        for model, count in models.items():
            assert everything[name, model]["requests"] == count
    status, _, body = server.ask("GET", "/v1/usage?group_by=tenant", authorization="Bearer acme-key")
    assert (status, "'group_by' has 'tenant'" in json.loads(body)["error"]["message"]) == (400, True)


def mixed(server: Serving, seconds: float, seed: int) -> None:
    """Send requests of all kinds for a while: some are cancelled, refused, cached, or kill their worker."""
    until = time.monotonic() + seconds
    number = seed
    while time.monotonic() < until:
        number += 1
        if number % 7 == 0:
            stream = Stream(server, "talks", parameters=ENDLESS)
            stream.event()
            stream.cut()
        elif number % 5 == 0:
            body = {"text_input": "once", "sampling_parameters": json.dumps({**FEW, "max_tokens": 40})}
            server.ask("POST", "/v2/models/talks/generate", body, authorization="Bearer acme-key")
        else:
            model = ("works", "calls", "chain", "cached")[number % 4]
            infer(
                server,
                model,
                13.0 if number % 61 == 0 else float(number % 9 + 20),
                ("acme-key", "other-key")[number % 2],
            )


def test_after_a_mixed_time_it_adds_up(server: Serving, folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for work in [pool.submit(mixed, server, 8.0, seed) for seed in (0, 10, 20, 30)]:
            work.result()
    told = balance(server, folder / "ledger.db")
    assert told.rows > 1
    assert abs(told.share) < 0.0001, told
    metrics = server.metrics()
    assert abs(metrics["nerite_ledger_unaccounted_seconds"]) < 1e-6
    assert metrics["nerite_ledger_rows_total"] > 100
    assert metrics["nerite_ledger_summed_rows_total"] == metrics["nerite_ledger_failed_writes_total"] == 0


def test_steps_that_run_in_one_worker_have_rows_of_their_own(tmp_path: Path) -> None:
    models, ledger = tmp_path / "models", tmp_path / "ledger.db"
    for name in ("first", "second"):
        python_model(models, name, WORKS, pbtxt(parameters=SHARED_WORKER))
    ensemble(models, "both", step("first", "INPUT0", "between"), step("second", "between", "OUTPUT0"))
    with serving(models, tmp_path / "log", f"--ledger={ledger}") as running:
        assert [infer(running, "both") for _ in range(5)] == [200] * 5
        found = usage(running, "model", "origin")
        assert {key: each["requests"] for key, each in found.items()} == {
            ("both", "client"): 5,
            ("first", "call"): 5,
            ("second", "call"): 5,
        }
        for name in ("first", "second"):
            assert 0.08 < found[name, "call"]["compute_seconds"] < 0.5
    assert abs(balance_of(ledger).share) < 1e-4


def test_a_model_that_answers_later(tmp_path: Path) -> None:
    models, ledger = tmp_path / "models", tmp_path / "ledger.db"
    python_model(models, "sends", SENDS, pbtxt(more="model_transaction_policy { decoupled: true }"))
    with serving(models, tmp_path / "log", f"--ledger={ledger}") as running:
        body = {"INPUT0": [1.0]}
        for _ in range(3):
            assert running.ask("POST", "/v2/models/sends/generate_stream", body)[0] == 200
        found = usage(running, "model", "ending")
        assert {key: each["requests"] for key, each in found.items()} == {("sends", "answered"): 3}
        assert found["sends", "answered"]["compute_seconds"] > 0
    assert abs(balance_of(ledger).share) < 1e-4


def test_with_front_processes(folder: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    flags = ["--front-processes=2", f"--policy-file={folder / 'policy.toml'}", ALL_TENANTS, f"--ledger={ledger}"]
    models = tmp_path / "models"
    python_model(models, "works", WORKS)
    with serving(models, tmp_path / "log", *flags) as running:
        assert [infer(running, "works") for _ in range(5)] == [200] * 5
        status, _, body = running.ask("GET", "/v1/usage?group_by=model", authorization="Bearer acme-key")
        assert (status, json.loads(body)["data"][0]["requests"]) == (200, 5)
    assert abs(balance_of(ledger).share) < 1e-4


def test_what_a_killed_server_had_written_adds_up(folder: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    models = tmp_path / "models"
    python_model(models, "works", WORKS)
    (models / "talks").mkdir()
    language_model(models / "talks" / "1")
    (models / "talks" / "config.pbtxt").write_text(NARROW)
    with serving(models, tmp_path / "log", f"--ledger={ledger}", clean=False) as running:
        stream = Stream(running, "talks", parameters=ENDLESS)
        stream.event()
        began = time.monotonic()
        while time.monotonic() - began < 3:
            infer(running, "works")
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        stream.cut()
    told = balance_of(ledger)
    assert abs(told.share) < 1e-4, told
    assert told.wall > 2 * 2.0, "the last second is missing at most"
    database = Database(str(ledger), [LedgerSchema()])
    endings = dict(
        database.call(lambda transaction: transaction.rows("SELECT ending, SUM(requests) FROM ledger_rows GROUP BY 1"))
    )
    database.close()
    assert endings["answered"] > 10
    with serving(models, tmp_path / "log", f"--ledger={ledger}") as running:
        assert infer(running, "works") == 200
        assert usage(running, "model")[("works",)]["requests"] > endings["answered"]


def test_without_a_ledger_there_is_no_usage(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "works", WORKS)
    with serving(tmp_path / "models", tmp_path / "log") as running:
        status, _, body = running.ask("GET", "/v2/usage")
        assert (status, "start it with --ledger" in json.loads(body)["error"]) == (501, True)
        assert not any("nerite_ledger" in name for name in running.metrics())


def test_without_a_key_a_tenant_sees_its_own_figures_and_nobody_else_any(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "works", WORKS)
    (tmp_path / "policy.toml").write_text(POLICY)
    flags = [f"--policy-file={tmp_path / 'policy.toml'}", f"--ledger={tmp_path / 'ledger.db'}"]
    with serving(tmp_path / "models", tmp_path / "log", *flags, "--front-processes=2") as server:
        assert [infer(server, "works", key=key) for key in ("acme-key", "acme-key", "other-key")] == [200] * 3
        for path in ("/v2/usage?group_by=tenant", "/v2/quota"):
            for key in ("", "Bearer wrong"):
                status, _, body = server.ask("GET", path, authorization=key)
                assert status == 403
                assert b"start the server with --http-restricted-api=statistics:admin-key=@FILE" in body
        _, _, body = server.ask("GET", "/v2/usage?group_by=tenant", authorization="Bearer acme-key")
        assert [(each["tenant"], each["requests"]) for each in json.loads(body)["data"]] == [("acme", 2)]
        told = json.loads(server.ask("GET", "/v2/quota", authorization="Bearer acme-key")[2])
        assert {each["tenant"] for part in ("tenants", "use") for each in told[part]} == {"acme"}
        done = subprocess.run([NERITE, "quota", "--url", server.http], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "The key of a tenant shows that tenant's own figures" in done.stderr


def test_beside_the_key_to_all_figures_a_tenant_sees_its_own(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "works", WORKS)
    (tmp_path / "policy.toml").write_text(POLICY)
    flags = [f"--policy-file={tmp_path / 'policy.toml'}", f"--ledger={tmp_path / 'ledger.db'}", ALL_TENANTS]
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        assert [infer(server, "works", key=key) for key in ("acme-key", "other-key")] == [200] * 2
        for headers, seen in (
            ({"authorization": "Bearer acme-key"}, {"acme"}),
            ({"authorization": "Bearer acme-key", "x_admin_key": "tests"}, {"acme", "other"}),
        ):
            status, _, body = server.ask("GET", "/v2/usage?group_by=tenant", **headers)
            assert (status, {each["tenant"] for each in json.loads(body)["data"]}) == (200, seen)
            assert seen <= {each["tenant"] for each in json.loads(server.ask("GET", "/v2/quota", **headers)[2])["use"]}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x_admin_key": "wrong"}):
            for path in ("/v2/usage", "/v2/quota"):
                assert server.ask("GET", path, **headers)[0] == 403
        assert server.ask("GET", "/v2/models/stats", authorization="Bearer acme-key")[0] == 403
