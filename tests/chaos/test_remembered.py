"""Clients that never repeat themselves: what is remembered of what they sent stays small, in server and workers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, IN_PROCESS, Serving, ensemble, eventually, pbtxt, python_model, serving, step

MB = 1 << 20
GROWTH = 80 * MB
"""What a process may grow by, with fragments and buffers: the budgets that an attack can fill are half of it."""
WORKER = 'parameters { key: "WORKER" value: { string_value: "steps" } }'
STATE = 'state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: 1 }'
MODELS = ("identity", "pipeline", "sequence")


@pytest.fixture(params=["in process", "in workers"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    models, alone, together = tmp_path / "models", "", WORKER
    if request.param == "in process":
        alone = together = IN_PROCESS
    python_model(models, "identity", IDENTITY, pbtxt(parameters=alone))
    python_model(models, "sequence", IDENTITY, pbtxt(more=f"sequence_batching {{ {STATE} }}", parameters=alone))
    for name in ("first", "second"):
        python_model(models, name, IDENTITY, pbtxt(parameters=together))
    ensemble(models, "pipeline", step("first", "INPUT0", "between"), step("second", "between", "OUTPUT0"))
    with serving(models, tmp_path / "log") as running:
        for model in MODELS:
            connection = connect(running)
            for number in range(100):
                assert post(connection, document(parameters=sequence(number)), model) == 200
            connection.close()
        yield running


def resident(server: Serving) -> dict[str, int]:
    """Return the memory that the server and each of its workers have."""
    processes = {"the server": server.process.pid, **server.workers()}
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for name, pid in processes.items()}


def connect(server: Serving) -> http.client.HTTPConnection:
    host, port = server.http.split(":")
    return http.client.HTTPConnection(host, int(port), timeout=90)


def sequence(number: int) -> dict[str, Any]:
    """Return the parameters of the only request of a sequence; to other models they are parameters like any other."""
    return {"sequence_id": 1 + number, "sequence_start": True, "sequence_end": True}


def document(**more: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}], **more}
    ).encode()


def binary(parameter: str) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request that would be known if it came again."""
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
    said = {"inputs": [tensor], "parameters": {"binary_data_output": True, "parameter": parameter, **sequence(0)}}
    text = json.dumps(said).encode()
    return text + bytes(4), {"Inference-Header-Content-Length": str(len(text))}


def post(connection: http.client.HTTPConnection, body: bytes, model: str = "identity", **headers: str) -> int:
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def stays_small(server: Serving, before: dict[str, int]) -> None:
    """Fail unless the memory comes back, in each process, and requests are answered as before."""

    def grown() -> dict[str, int]:
        return {name: (size - before[name]) // MB for name, size in resident(server).items()}

    eventually(lambda: max(grown().values()) < GROWTH // MB, 10, f"grown by so many MB: {grown()}")
    assert server.infer("identity", [1.0]) == server.infer("pipeline", [1.0]) == [1.0]
    caches = {name: value for name, value in server.metrics().items() if name.startswith("nerite_internal_cache_")}
    for name, value in caches.items():
        if name.startswith("nerite_internal_cache_bytes"):
            assert value <= caches[name.replace("_bytes", "_limit_bytes")]


@pytest.mark.timeout(120)
def test_parameters_as_large_as_they_may_be(server: Serving) -> None:
    before = resident(server)
    with closing(connect(server)) as connection:
        for number in range(300):
            said = {"parameter": f"{number} " + "x" * 1_000_000, **sequence(number)}
            assert post(connection, document(parameters=said), MODELS[number % 3]) == 200
    stays_small(server, before)


@pytest.mark.timeout(120)
def test_several_parameters_as_large_as_they_may_be(server: Serving) -> None:
    before = resident(server)
    with closing(connect(server)) as connection:
        for number in range(90):
            said = {f"{number} {at}": "x" * 1_000_000 for at in range(4)} | sequence(number)
            assert post(connection, document(parameters=said), MODELS[number % 3]) == 200
    stays_small(server, before)


@pytest.mark.timeout(120)
def test_refusals_that_quote_what_was_sent(server: Serving) -> None:
    before = resident(server)
    with closing(connect(server)) as connection:
        for number in range(100):
            output = {"name": f"{number} " + "x" * 2_000_000}
            assert post(connection, document(outputs=[output, output])) == 400
    stays_small(server, before)


@pytest.mark.timeout(120)
def test_requests_that_differ_a_little_under_many_heads(server: Serving) -> None:
    before = resident(server)
    for head in range(60):
        with closing(connect(server)) as connection:
            for number in range(100):
                body, headers = binary(f"{head} {number} " + "x" * 12_000)
                assert post(connection, body, MODELS[head % 3], **headers, Number=str(head)) == 200
    stays_small(server, before)
    metrics = server.metrics()
    caches = ["http_plans", "ensembles", "sequences", *(["worker_headers"] if server.workers() else [])]
    assert all(metrics[f'nerite_internal_cache_evictions_total{{cache="{cache}"}}'] > 0 for cache in caches)


@pytest.mark.timeout(120)
def test_many_connections_with_large_requests(server: Serving) -> None:
    before = resident(server)
    connections = [connect(server) for _ in range(400)]
    for number, connection in enumerate(connections):
        body, headers = binary(f"{number} " + "x" * 200_000)
        assert post(connection, body, **headers) == 200
    stays_small(server, before)
    for connection in connections:
        connection.close()
