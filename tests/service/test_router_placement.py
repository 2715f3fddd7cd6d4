"""A router that places models on three real servers: more models than fit, shifting demand, failures, restarts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from ports import free_ports
from redis_server import redis_server
from routing import ROUTER, pool, routing, samples
from serving import HELD, IDENTITY, IN_PROCESS, PATIENCE, Serving, eventually, let_go, pbtxt, python_model, serving

KEY = "model-repository:X-Admin-Key=open-sesame"
BROKEN = "def initialize(self, args):\n    raise pb_utils.TritonModelException('no weights')\n"

ECHO = """
def execute(self, requests):
    for request in requests:
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([prompt], object))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TEXT = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
"""


@contextmanager
def members(models: Path, logs: Path, count: int, *flags: str) -> Iterator[list[Serving]]:
    """Run so many servers that load models when they are told to."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serving(models, logs / f"member-{number}.log", "--model-control-mode=explicit", *flags, clean=False)
            )
            for number in range(count)
        ]


def placed(servers: Sequence[Serving], *, grpc: bool = False, more: str = "", **keys: Any) -> str:
    """Return a pool of these servers, with room for two models each."""
    table = pool(*(each.http for each in servers), **{"retry_floor": 1000, **keys})
    if grpc:
        lines = ", ".join(f'{{ http = "{each.http}", grpc = "{each.grpc}" }}' for each in servers)
        table = "\n".join(f"members = [{lines}]" if line.startswith("members") else line for line in table.split("\n"))
    settings = {"memory": "2GiB", "model-memory": "1GiB", "hold": "200ms", "rise": "1s", "fall": "2s"}
    return f"{table}[pool.placement]\n" + "".join(f'{key} = "{value}"\n' for key, value in settings.items()) + more


def identities(folder: Path, count: int) -> Path:
    models = folder / "models"
    for number in range(count):
        python_model(models, f"m{number}", IDENTITY, pbtxt(parameters=IN_PROCESS))
    return models


def copies(router: Serving) -> dict[str, int]:
    """Return the copies of models that have any."""
    found = samples(router, "nerite_router_model_copies")
    return {key.partition('model="')[2].partition('"')[0]: int(value) for key, value in found.items() if value}


def orders(router: Serving, step: str, outcome: str = "done") -> float:
    found = samples(router, "nerite_router_orders_total")
    return found.get(f'nerite_router_orders_total{{outcome="{outcome}",pool="main",step="{step}"}}', 0.0)


def ready_models(server: Serving) -> set[str]:
    return {each["name"] for each in server.json("POST", "/v2/repository/index", {"ready": True})}


def test_more_models_than_fit(tmp_path: Path) -> None:
    models = identities(tmp_path, 9)
    with members(models, tmp_path, 3) as servers, routing(tmp_path, placed(servers)) as router:
        assert router.ready()
        assert not router.ready("m0")
        for _ in range(2):
            for number in range(9):
                assert router.infer(f"m{number}", [1.0, 2.0]) == [1.0, 2.0]
        held = [ready_models(each) for each in servers]
        assert all(len(each) <= 2 for each in held)
        assert orders(router, "load") >= 12
        assert orders(router, "unload") >= orders(router, "load") - 6
        assert router.ask("POST", "/v2/models/none/infer", b"{}")[0] == 404
        index = router.json("POST", "/v2/repository/index")
        assert {each["name"] for each in index} == {f"m{number}" for number in range(9)}
        assert "is to load model 'm0': 0 of 1 copies" in router.text


def test_copies_follow_demand(tmp_path: Path) -> None:
    models = identities(tmp_path, 1)
    python_model(models, "busy", HELD)
    with (
        members(models, tmp_path, 3) as servers,
        routing(tmp_path, placed(servers, more="target = 2.0\n")) as router,
    ):
        askers = [threading.Thread(target=router.infer, args=("busy", [-1.0])) for _ in range(5)]
        for each in askers:
            each.start()
        eventually(lambda: copies(router) == {"busy": 3})
        eventually(lambda: all("busy" in ready_models(each) for each in servers))
        let_go(models / "busy")
        for each in askers:
            each.join(PATIENCE)
        assert router.infer("m0", [1.0]) == [1.0]


def test_requests_wait_over_all_protocols(tmp_path: Path) -> None:
    models = identities(tmp_path, 1)
    python_model(models, "echo", ECHO, TEXT)
    with members(models, tmp_path, 1) as servers, routing(tmp_path, placed(servers, grpc=True)) as router:
        client = grpcclient.InferenceServerClient(router.grpc)
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[3.0]], np.float32))
        assert not client.is_model_ready("m0")
        answer = client.infer("m0", [tensor])
        assert answer.as_numpy("OUTPUT0").tolist() == [[3.0]]
        client.close()
        status, _, told = router.ask("POST", "/v1/completions", {"model": "echo", "prompt": "hello"})
        assert status == 200, told
        assert json.loads(told)["choices"][0]["text"] == "hello"
        assert samples(router, "nerite_router_held_total") == {
            'nerite_router_held_total{outcome="served",pool="main"}': 2
        }


def test_a_killed_server_is_replaced_and_a_restarted_one_gets_its_models_again(tmp_path: Path) -> None:
    models = identities(tmp_path, 2)
    ports = [free_ports(3) for _ in range(2)]
    flags = [
        (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}") for http, grpc, metrics in ports
    ]
    explicit = "--model-control-mode=explicit"
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(serving(models, tmp_path / f"{place}.log", explicit, *flags[place], clean=False))
            for place in range(2)
        )
        more = "[pool.placement.models]\nm0 = { least = 2 }\n"
        with routing(tmp_path, placed((first, second), more=more)) as router:
            eventually(lambda: copies(router) == {"m0": 2})
            assert router.infer("m1", [1.0]) == [1.0]
            (holder,) = [each for each in (first, second) if "m1" in ready_models(each)]
            place = (first, second).index(holder)
            holder.process.kill()
            holder.process.wait()
            assert router.infer("m1", [2.0]) == [2.0]
            eventually(lambda: copies(router) == {"m0": 1, "m1": 1})
            again = stack.enter_context(serving(models, tmp_path / "again.log", explicit, *flags[place], clean=False))
            eventually(lambda: "m0" in ready_models(again))


def test_a_model_that_fails_to_load(tmp_path: Path) -> None:
    models = identities(tmp_path, 1)
    python_model(models, "broken", BROKEN + IDENTITY, pbtxt(parameters=IN_PROCESS))
    with members(models, tmp_path, 2) as servers, routing(tmp_path, placed(servers, more="")) as router:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        status, headers, told = router.ask("POST", "/v2/models/broken/infer", body)
        error = json.loads(told)["error"]
        assert status == 503
        assert "its load has failed at every member" in error
        assert "no weights" in error
        assert int(headers["Retry-After"]) >= 1
        eventually(lambda: orders(router, "load", "failed") == 2)
        assert router.infer("m0", [1.0]) == [1.0]


def test_a_model_that_no_member_has_room_for(tmp_path: Path) -> None:
    models = identities(tmp_path, 1)
    more = '[pool.placement.models]\nm0 = { memory = "3GiB" }\n'
    with members(models, tmp_path, 1) as servers, routing(tmp_path, placed(servers, more=more)) as router:
        began = time.monotonic()
        status, headers, told = router.ask("POST", "/v2/models/m0/infer", b"{}")
        assert status == 503
        assert b"it needs 3 GiB, and no member has more than 2 GiB for models" in told
        assert time.monotonic() - began < PATIENCE / 2
        assert int(headers["Retry-After"]) >= 1


def test_servers_whose_repository_api_is_restricted(tmp_path: Path) -> None:
    models = identities(tmp_path, 1)
    key = tmp_path / "key"
    key.write_text("open-sesame\n")
    more = f'key = "X-Admin-Key=@{key}"\n'
    with (
        members(models, tmp_path, 1, f"--http-restricted-api={KEY}") as servers,
        routing(tmp_path, placed(servers, more=more)) as router,
    ):
        assert router.infer("m0", [1.0]) == [1.0]


@pytest.mark.parametrize("waits", [False, True])
def test_a_pool_without_members(tmp_path: Path, waits: bool) -> None:
    models = identities(tmp_path, 1)
    file = tmp_path / "members.txt"
    file.write_text("")
    table = pool(hold_requests=10 if waits else 0, members_file=str(file)).replace("members = []\n", "")
    answers: list[Any] = []
    with routing(tmp_path, table) as router:
        asker = threading.Thread(target=lambda: answers.append(router.ask("GET", "/v2/models/m0/ready")[0]))
        asker.start()
        asker.join(PATIENCE)
        assert answers == [503], "a question does not wait"
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        asker = threading.Thread(target=lambda: answers.append(router.ask("POST", "/v2/models/m0/infer", body)[0]))
        asker.start()
        if waits:
            eventually(lambda: samples(router, "nerite_router_held")['nerite_router_held{pool="main"}'] == 1)
            with serving(models, tmp_path / "member.log") as server:
                router.follow(file, f"{server.http}\n")
                asker.join(PATIENCE)
                assert answers == [503, 200]
        else:
            asker.join(PATIENCE)
            assert answers == [503, 503]


def test_one_of_several_routers_gives_orders(tmp_path: Path) -> None:
    models = identities(tmp_path, 6)
    with members(models, tmp_path, 2) as servers, ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        routers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            settings = f'{ROUTER}redis = "redis://127.0.0.1:{redis.port}"\n'
            routers.append(stack.enter_context(routing(tmp_path / name, placed(servers), router=settings)))
        for number in range(6):
            for router in routers:
                assert router.infer(f"m{number}", [1.0]) == [1.0]
        assert sorted(orders(router, "load") > 0 for router in routers) == [False, True]
        redis.stop()
        for number in range(6):
            for router in routers:
                assert router.infer(f"m{number}", [1.0]) == [1.0]
