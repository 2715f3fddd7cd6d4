"""Two pools before a router: members are lent both ways, and batch work makes room for what comes first."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_models import language_model
from routing import Received, StandInMember, pool, response, routing, samples, stand_ins
from serving import ALL_TENANTS, PATIENCE, Serving, eventually, serving

CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


class Gate:
    """Holds the answers of a member until they are let go, and tells of connections that were closed before."""

    def __init__(self, held: bool = True) -> None:
        self.open = threading.Event()
        self.left = threading.Semaphore(0)
        if not held:
            self.open.set()

    def answer(self, asked: Received, connection: socket.socket) -> bytes | None:
        connection.settimeout(0.02)
        while not self.open.is_set():
            try:
                if not connection.recv(1):
                    self.left.release()
                    return None
            except TimeoutError:
                continue
        connection.settimeout(PATIENCE)
        return response(json.dumps({"model": "m"}).encode())


@contextmanager
def two_pools(folder: Path, own: StandInMember, batch: StandInMember, own_keys: dict[str, Any], batch_keys: Any) -> Any:
    pools = (
        pool(own.address, name="interactive", classes=["interactive"], kind="vllm", **own_keys),
        pool(batch.address, name="batch", classes=["batch"], kind="vllm", **batch_keys),
    )
    with routing(folder, *pools) as running, ThreadPoolExecutor(8) as threads:
        yield (
            running,
            lambda level: threads.submit(running.ask, "POST", CHAT, ASKED, x_nerite_class=level),
        )


def lent(router: Serving, name: str) -> float:
    return samples(router, "nerite_router_lent")[f'nerite_router_lent{{pool="{name}"}}']


def preempted(router: Serving, name: str) -> float:
    return samples(router, "nerite_router_preempted_total")[f'nerite_router_preempted_total{{pool="{name}"}}']


def test_batch_work_leaves_for_an_interactive_request_and_ends_all_the_same(tmp_path: Path) -> None:
    own_gate, batch_gate = Gate(), Gate()
    with (
        stand_ins(1, own_gate.answer) as (own,),
        stand_ins(1, batch_gate.answer) as (batch,),
        two_pools(tmp_path, own, batch, {"preempts": True}, {"borrows": True, "max-requests": 1, "lends": 0}) as (
            router,
            ask,
        ),
    ):
        home = ask("batch")
        eventually(lambda: len(batch.requests) == 1)
        moved = ask("batch")
        eventually(lambda: len(own.requests) == 1)
        assert lent(router, "interactive") == 1
        mine = ask("interactive")
        assert own_gate.left.acquire(timeout=PATIENCE), "the connection of the batch request is closed"
        eventually(lambda: len(own.requests) == 2)
        assert preempted(router, "interactive") == 1
        batch_gate.open.set()
        assert home.result(PATIENCE)[0] == moved.result(PATIENCE)[0] == 200
        assert len(batch.requests) == 2
        own_gate.open.set()
        assert mine.result(PATIENCE)[0] == 200
        assert lent(router, "interactive") == 0


def test_an_interactive_request_borrows_and_stops_batch_work_there(tmp_path: Path) -> None:
    own_gate, batch_gate = Gate(), Gate()
    with (
        stand_ins(1, own_gate.answer) as (own,),
        stand_ins(1, batch_gate.answer) as (batch,),
        two_pools(tmp_path, own, batch, {"preempts": True, "borrows": True, "max-requests": 1, "lends": 0}, {}) as (
            router,
            ask,
        ),
    ):
        first = ask("interactive")
        eventually(lambda: len(own.requests) == 1)
        work = ask("batch")
        eventually(lambda: len(batch.requests) == 1)
        second = ask("interactive")
        assert batch_gate.left.acquire(timeout=PATIENCE)
        assert preempted(router, "batch") == 1
        batch_gate.open.set()
        own_gate.open.set()
        assert [each.result(PATIENCE)[0] for each in (first, second, work)] == [200] * 3


def test_the_reserve_and_lends_hold(tmp_path: Path) -> None:
    gate = Gate()
    with (
        stand_ins(2, gate.answer) as (one, other),
        stand_ins(1, gate.answer) as (batch,),
        routing(
            tmp_path,
            pool(one.address, other.address, name="i", classes=["interactive"], kind="vllm", lends=2, reserve=1),
            pool(batch.address, name="b", classes=["batch"], kind="vllm", borrows=True, **{"max-requests": 1}),
        ) as router,
        ThreadPoolExecutor(8) as threads,
    ):
        asked = [threads.submit(router.ask, "POST", CHAT, ASKED, x_nerite_class="batch") for _ in range(5)]
        eventually(lambda: sum(each.done() for each in asked) == 2)
        eventually(lambda: sum(len(each.requests) for each in (one, other, batch)) == 3)
        assert sorted((len(one.requests), len(other.requests))) == [0, 2]
        gate.open.set()
        statuses = sorted(each.result(PATIENCE)[0] for each in asked)
        assert statuses == [200, 200, 200, 429, 429]


def test_lent_work_is_of_the_idle_class_at_a_member_of_ours(tmp_path: Path) -> None:
    gate = Gate()
    with (
        stand_ins(1) as (own,),
        stand_ins(1, gate.answer) as (batch,),
        routing(
            tmp_path,
            pool(own.address, name="i", classes=["interactive"]),
            pool(batch.address, name="b", classes=["batch"], borrows=True, **{"max-requests": 1}),
        ) as router,
        ThreadPoolExecutor(2) as threads,
    ):
        home = threads.submit(router.ask, "POST", CHAT, ASKED, x_nerite_class="batch")
        eventually(lambda: len(batch.requests) == 1)
        assert router.ask("POST", CHAT, ASKED, x_nerite_class="batch")[0] == 200
        assert router.ask("POST", CHAT, {**ASKED, "stream": True}, x_nerite_class="batch")[0] == 200
        gate.open.set()
        assert home.result(PATIENCE)[0] == 200
        assert [each.headers["x-nerite-class"] for each in (*batch.requests, *own.requests)] == [
            "batch", "idle", "batch",
        ]  # fmt: skip


ENGINE = """
backend: "openvino_genai"
instance_group [{ kind: KIND_CPU }]
parameters { key: "MAX_NUM_SEQS" value { string_value: "2" } }
"""
WORK = {"model": "tiny", "prompt": "once", "ignore_eos": True, "temperature": 0}
COMPLETIONS = "/v1/completions"


@contextmanager
def engine(folder: Path) -> Iterator[Serving]:
    """Run a server with a language model that has room for one request."""
    language_model(folder / "models" / "tiny" / "1")
    (folder / "models" / "tiny" / "config.pbtxt").write_text(ENGINE)
    (folder / "policy.toml").write_text("[llms.tiny]\nmax_sequences = 1\n")
    with serving(folder / "models", folder / "log", f"--policy-file={folder / 'policy.toml'}", ALL_TENANTS) as running:
        yield running


def admitted(server: Serving, level: str) -> float:
    found = server.json("GET", "/v2/quota")["use"]
    return float(next((each["admitted"] for each in found if each["class"] == level), 0))


def test_an_engine_stops_lent_work_between_two_tokens_for_its_own_clients(tmp_path: Path) -> None:
    gate = Gate()
    with (
        engine(tmp_path) as own,
        stand_ins(1, gate.answer, models=("tiny",)) as (batch,),
        routing(
            tmp_path,
            pool(own.http, name="i", classes=["interactive"]),
            pool(batch.address, name="b", classes=["batch"], borrows=True, **{"max-requests": 1}),
        ) as router,
        ThreadPoolExecutor(3) as threads,
    ):
        home = threads.submit(router.ask, "POST", COMPLETIONS, WORK, x_nerite_class="batch")
        eventually(lambda: len(batch.requests) == 1)
        long = {**WORK, "max_tokens": 3000}
        lent_work = threads.submit(router.ask, "POST", COMPLETIONS, long, x_nerite_class="batch")
        eventually(lambda: admitted(own, "idle") == 1)
        assert own.ask("POST", COMPLETIONS, {**WORK, "max_tokens": 20})[0] == 200
        status, _, body = lent_work.result(PATIENCE)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3000)
        assert admitted(own, "idle") > 1, "it was stopped and came again"
        gate.open.set()
        assert home.result(PATIENCE)[0] == 200
