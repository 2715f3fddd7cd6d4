"""Files and batches at a router: items at members of all kinds, in idle room, and after the death of a router."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from test_batches import POISON, output, upload, wait

from nerite.storage.database import Database
from postgres_server import postgres_server
from routing import ADMIN_KEY, ROUTER, Received, events, pool, response, routing, stand_ins
from serving import NERITE, Serving, eventually

CHAT = "/v1/chat/completions"
INFER = "/v2/models/m/infer"
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}'


def with_batches(folder: Path, more: str = "") -> str:
    return f"{ROUTER}batches = '{folder / 'batches.db'}'\n{more}"


def connected(router: Serving, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{router.http}/v1", api_key=key, max_retries=0)


def chat(number: int) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"text {number}"}]}
    return {"custom_id": f"item-{number}", "url": CHAT, "body": body}


def tensors(number: int) -> dict[str, Any]:
    body = {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [number]}]}
    return {"custom_id": f"item-{number}", "url": INFER, "body": body}


def create(client: openai.OpenAI, items: list[dict[str, Any]], window: str = "1h") -> Any:
    file = upload(client, *items)
    return client.batches.create(input_file_id=file.id, endpoint=items[0]["url"], completion_window=window)  # type: ignore[arg-type]


def number_of(asked: Received) -> str:
    return str(json.loads(asked.body)["messages"][0]["content"])


class Held:
    """Answers requests once a test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, asked: Received, connection: socket.socket) -> bytes:
        self.begun.release()
        self.go.wait(60)
        return response(ANSWER)


def test_a_batch_from_its_file_to_its_answers(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes:
        if number_of(asked) == "text 7":
            return response(b'{"error":"no"}', 400)
        if number_of(asked) == "text 8":
            return events("a", "b")  # in chunks
        return response(ANSWER)

    with (
        stand_ins(2, answer) as members,
        routing(tmp_path, pool(*(each.address for each in members)), router=with_batches(tmp_path)) as router,
        connected(router) as client,
    ):
        batch = wait(client, create(client, [chat(n) for n in range(40)]))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 39, 1)
        rows = output(client, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [f"item-{n}" for n in range(40) if n != 7]
        assert rows[0]["response"]["body"] == json.loads(ANSWER)
        assert rows[7]["response"]["body"] == {"text": "data: a\n\ndata: b\n\n"}
        assert all(len(each.requests) > 5 for each in members), "both members have worked"
        asked = members[0].requests[0]
        assert asked.headers["x-nerite-class"] == "idle"
        assert router.metrics()['nerite_batch_items_total{outcome="completed"}'] == 39


def test_items_of_kserve_wait_for_a_member_without_work(tmp_path: Path) -> None:
    held = Held()

    def answer(asked: Received, connection: socket.socket) -> bytes:
        if "x-nerite-class" in asked.headers:
            return response(b'{"model_name":"m","outputs":[]}')
        return held(asked, connection)

    with (
        stand_ins(1, answer) as (member,),
        routing(tmp_path, pool(member.address, kind="triton"), router=with_batches(tmp_path)) as router,
        connected(router) as client,
    ):
        client_of_model = threading.Thread(target=router.ask, args=("POST", INFER, b"{}"))
        client_of_model.start()
        held.begun.acquire(timeout=60)
        batch = create(client, [tensors(n) for n in range(5)])
        eventually(lambda: router.metrics()['nerite_batch_items_total{outcome="refused"}'] > 2)
        assert len(member.requests) == 1
        held.go.set()
        client_of_model.join(60)
        batch = wait(client, batch)
        assert batch.request_counts.completed == 5
        assert json.loads(member.requests[1].body)["inputs"][0]["data"] == [0]


def test_a_member_that_is_not_to_be_asked_for_ages(tmp_path: Path) -> None:
    """Digits without end are no number of seconds."""
    refusals = [response(b"{}", 429, more=f"Retry-After: {'9' * digits}\r\n") for digits in (400, 10)]
    with (
        stand_ins(1, lambda asked, connection: refusals.pop() if refusals else response(ANSWER)) as (member,),
        routing(tmp_path, pool(member.address), router=with_batches(tmp_path)) as router,
        connected(router) as client,
    ):
        batch = wait(client, create(client, [chat(n) for n in range(3)]))
        assert batch.request_counts.completed == 3
        assert len(member.requests) == 5


def test_an_item_goes_to_another_member_when_one_dies(tmp_path: Path) -> None:
    with (
        stand_ins(2, lambda asked, connection: response(ANSWER)) as members,
        routing(tmp_path, pool(*(each.address for each in members)), router=with_batches(tmp_path)) as router,
        connected(router) as client,
    ):
        dying = members[0]
        dying.answer = lambda asked, connection: dying.stop()
        batch = wait(client, create(client, [chat(n) for n in range(30)]))
        assert batch.request_counts.completed == 30
        assert len(members[1].requests) == 30


def test_a_cancelled_batch_closes_its_requests_at_members(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> None:
        while connection.recv(100):
            pass

    with (
        stand_ins(1, answer) as (member,),
        routing(tmp_path, pool(member.address), router=with_batches(tmp_path)) as router,
        connected(router) as client,
    ):
        batch = create(client, [chat(n) for n in range(3)])
        eventually(lambda: len(member.requests) == 1)
        client.batches.cancel(batch.id)
        assert member.closed.acquire(timeout=60)
        assert wait(client, batch).status == "cancelled"


def test_the_command_runs_a_file_at_a_router(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(chat(n)) + "\n" for n in range(5)))
    with (
        stand_ins(1, lambda asked, connection: response(ANSWER)) as (member,),
        routing(tmp_path, pool(member.address), router=with_batches(tmp_path)) as router,
    ):
        command = [NERITE, "batch", "run", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--url", router.http]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "5 of 5 requests completed" in done.stdout, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5


def test_tenants_see_their_own_and_pay_for_them(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(
        '[tenants.acme]\nkeys = ["a-key"]\n[tenants.umbrella]\nkeys = ["b-key"]\n[default]\nrequests_per_minute = 1\n'
    )
    with (
        stand_ins(1, lambda asked, connection: response(ANSWER)) as (member,),
        routing(
            tmp_path, pool(member.address), router=with_batches(tmp_path, f'policy-file = "policy.toml"\n{ADMIN_KEY}')
        ) as router,
        connected(router, "a-key") as acme,
        connected(router, "b-key") as umbrella,
    ):
        batch = wait(acme, create(acme, [chat(n) for n in range(10)]))
        assert batch.request_counts.completed == 10
        with pytest.raises(openai.NotFoundError):
            umbrella.files.content(batch.output_file_id)
        assert umbrella.batches.list().data == []
        used = {(use["tenant"], use["class"]): use["admitted"] for use in router.json("GET", "/v2/quota")["use"]}
        assert used["acme", "idle"] == 10


def test_a_router_without_batches_says_how_to_have_some(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address)) as router:
        status, _, body = router.ask("GET", "/v1/batches")
        assert status == 501
        assert "add batches to [router]" in json.loads(body)["error"]["message"]


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    with postgres_server(tmp_path / "postgres") as location:
        yield location


def counting(asked_for: Counter[str]) -> Callable[[Received, socket.socket], bytes]:
    """Return what answers items after 20 ms, and counts how often each was asked."""
    lock = threading.Lock()

    def answer(asked: Received, connection: socket.socket) -> bytes:
        with lock:
            asked_for[number_of(asked)] += 1
        threading.Event().wait(0.02)
        return response(ANSWER)

    return answer


def committed_items(location: str) -> set[str]:
    database = Database(location, [])
    try:
        statement = "SELECT custom_id FROM batch_items WHERE state = 'completed'"
        return {name for (name,) in database.call(lambda each: each.rows(statement))}
    finally:
        database.close()


def test_no_answer_is_lost_or_paid_twice_when_a_router_is_killed(postgres: str, tmp_path: Path) -> None:
    asked_for: Counter[str] = Counter()
    answer = counting(asked_for)
    settings = f"{ROUTER}batches = '{postgres}'\nbatch-files = '{tmp_path / 'files'}'\nbatch-lease = '1s'\n"
    settings += "batch-concurrency = 4\n"
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with stand_ins(2, answer) as members:
        pools = pool(*(each.address for each in members))
        with routing(tmp_path / "other", pools, router=settings) as other, connected(other) as there:
            with routing(tmp_path / "one", pools, router=settings, clean=False) as one, connected(one) as here:
                batch = create(here, [chat(n) for n in range(400)])
                wait(here, batch, lambda now: now.request_counts.completed >= 60)
                assert there.batches.retrieve(batch.id).status == "in_progress"
                os.kill(one.process.pid, signal.SIGKILL)
                one.process.wait()
                committed = committed_items(postgres)
            batch = wait(there, batch)
            assert (batch.status, batch.request_counts.completed) == ("completed", 400)
            rows = output(there, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"item-{n}" for n in range(400)]
    assert 60 <= len(committed) < 400
    again = {name.replace("text ", "item-") for name, count in asked_for.items() if count > 1}
    assert committed.isdisjoint(again)
    assert max(asked_for.values()) <= 2


def test_a_damaged_file_of_one_tenant_does_not_stop_others(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[tenants.alice]\nkeys = ["a-key"]\n[tenants.bob]\nkeys = ["b-key"]\n')
    settings = with_batches(tmp_path, 'policy-file = "policy.toml"\n')

    def busy(asked: Received, connection: socket.socket) -> bytes:
        return response(b"{}", 503)

    with stand_ins(1, busy) as (member,):
        with routing(tmp_path, pool(member.address), router=settings) as router, connected(router, "a-key") as alice:
            with pytest.raises(openai.BadRequestError, match="nested deeper than 100 levels"):
                alice.files.create(file=("in.jsonl", POISON), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="'url' must be one of"):
                upload(alice, {**tensors(1), "url": "/v2/models/zz ABC\r\nX-Nerite-Tenant: bob\r\nX: 1/infer"})
            batch = create(alice, [chat(n) for n in range(200)])
            wait(alice, batch, lambda now: now.request_counts.total == 200)
        content = tmp_path / "batches.db.files" / batch.input_file_id
        os.truncate(content, content.stat().st_size // 2)
        member.answer = lambda asked, connection: response(ANSWER)
        with (
            routing(tmp_path, pool(member.address), router=settings) as router,
            connected(router, "a-key") as alice,
            connected(router, "b-key") as bob,
        ):
            assert wait(bob, create(bob, [chat(n) for n in range(5)])).request_counts.completed == 5
            batch = wait(alice, batch)
            assert batch.status == "completed"
            assert batch.request_counts.failed >= 99
            assert batch.request_counts.completed + batch.request_counts.failed == 200


def endings(location: str) -> dict[str, int]:
    """Return the number of rows of the ledger by how the requests ended."""
    database = Database(location, [])
    try:
        return dict(database.call(lambda each: each.rows("SELECT ending, count(*) FROM ledger_rows GROUP BY ending")))
    finally:
        database.close()


def test_a_router_that_stands_still_and_goes_on_with_a_clock_of_its_own(postgres: str, tmp_path: Path) -> None:
    asked_for: Counter[str] = Counter()
    answer = counting(asked_for)
    for name, seconds in (("one", 60), ("other", -60)):
        (tmp_path / name).mkdir()
        skewed = f"import time\nright = time.time\ntime.time = lambda: right() + {seconds}\n"
        (tmp_path / name / "sitecustomize.py").write_text(skewed)
    settings = f"{ROUTER}batches = '{postgres}'\nbatch-files = '{tmp_path / 'files'}'\nbatch-lease = '1s'\n"
    settings += f"batch-concurrency = 4\nledger = '{postgres}'\n"
    ahead, behind = ({"PYTHONPATH": str(tmp_path / name)} for name in ("one", "other"))
    with stand_ins(2, answer) as members:
        pools = pool(*(each.address for each in members))
        with (
            routing(tmp_path / "one", pools, router=settings, environment=ahead) as one,
            routing(tmp_path / "other", pools, router=settings, environment=behind) as other,
            connected(one) as here,
            connected(other) as there,
        ):
            batch = create(here, [chat(n) for n in range(300)])
            wait(here, batch, lambda now: now.request_counts.completed >= 40)
            os.kill(one.process.pid, signal.SIGSTOP)
            try:
                before = there.batches.retrieve(batch.id).request_counts.completed
                wait(there, batch, lambda now: now.request_counts.completed >= before + 40)
            finally:
                os.kill(one.process.pid, signal.SIGCONT)
            batch = wait(there, batch)
            rows = output(here, batch.output_file_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 300)
    assert [row["custom_id"] for row in rows] == [f"item-{n}" for n in range(300)]
    told = endings(postgres)
    assert told["answered"] == 300, told
    assert told.get("repeated", 0) <= sum(count - 1 for count in asked_for.values()) < 60, "only what was under way"
