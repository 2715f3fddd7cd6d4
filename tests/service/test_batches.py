"""OpenAI's own client with files and batches of a real server; a server that is killed in the middle; tenants."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from test_openai_api import EMBED, SIMPLE, VECTORS

from serving import ALL_TENANTS, IDENTITY, Serving, eventually, python_model, serving
from text_models import engine

CHAT = "/v1/chat/completions"
UPPER = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
        output = pb_utils.Tensor("text_output", np.array([[text.upper().encode()]], object))
        answers.append(pb_utils.InferenceResponse([output]))
    return answers
"""
SLOW = """
import time

def execute(self, requests):
    answers = []
    for request in requests:
        time.sleep(0.02)
        with open(LOG, "a") as log:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
            log.write(text + "\\n")
        output = pb_utils.Tensor("text_output", np.array([[text.upper().encode()]], object))
        answers.append(pb_utils.InferenceResponse([output]))
    return answers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("batches")
    models = folder / "models"
    engine(models, "words")
    python_model(models, "vectors", EMBED, VECTORS)
    python_model(models, "identity", IDENTITY)
    flags = [f"--batches={folder / 'batches.db'}", f"--ledger={folder / 'ledger.db'}"]
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with connected(server) as made:
        yield made


def connected(server: Serving, key: str = "none") -> openai.OpenAI:
    """Return a client, which is to be closed."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)


def chat(number: int, model: str = "words", text: str = "one two") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": f"item-{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(*items: Any) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def upload(client: openai.OpenAI, *items: Any, name: str = "in.jsonl") -> Any:
    return client.files.create(file=(name, jsonl(*items)), purpose="batch")


def wait(client: openai.OpenAI, batch: Any, holds: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return a batch when it has ended, or ``holds``."""
    deadline = time.monotonic() + 60
    while True:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled") or holds(batch):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def output(client: openai.OpenAI, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(name).text.splitlines()]


def test_a_batch_of_chats(client: openai.OpenAI) -> None:
    file = upload(client, *map(chat, range(30)))
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "in.jsonl", "processed")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"}
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "1"})
    assert batch.expires_at == batch.created_at + 86400
    batch = wait(client, batch)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 30, 0)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    rows = output(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"item-{number}" for number in range(30)]
    assert len({row["id"] for row in rows}) == 30
    answer = rows[0]["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, "chat.completion")
    assert answer["request_id"] == answer["body"]["id"]
    described = client.files.retrieve(batch.output_file_id)
    assert (described.purpose, described.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("url", "body", "key"),
    [
        ("/v1/completions", {"model": "words", "prompt": "a b c"}, "choices"),
        ("/v1/embeddings", {"model": "vectors", "input": "a b"}, "data"),
        (
            "/v2/models/identity/infer",
            {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]},
            "outputs",
        ),
    ],
)
def test_other_endpoints(client: openai.OpenAI, url: Any, body: Any, key: str) -> None:
    file = upload(client, {"custom_id": "one", "method": "POST", "url": url, "body": body})
    batch = wait(client, client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h"))
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert output(client, batch.output_file_id)[0]["response"]["body"][key]


def test_errors_of_items_are_in_a_file_of_their_own(client: openai.OpenAI) -> None:
    file = upload(client, chat(1), chat(2, text="raise"), {**chat(3), "body": {"model": "words"}})
    batch = wait(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    errors = output(client, batch.error_file_id)
    assert [(row["custom_id"], row["response"]["status_code"]) for row in errors] == [("item-2", 500), ("item-3", 400)]
    assert "messages" in errors[1]["response"]["body"]["error"]["message"]


def test_mistakes_are_told_with_their_lines(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Line 2: Missing required parameter: 'body'") as found:
        upload(client, chat(1), {"custom_id": "two", "url": CHAT})
    assert (found.value.code, found.value.param) == ("missing_required_parameter", "file")
    file = upload(client, chat(1))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = wait(client, batch)
    assert (batch.status, batch.errors.data[0].line) == ("failed", 1)
    assert batch.failed_at is not None


def test_files(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{n}.txt", bytes([n]) * 300_000), purpose="user_data") for n in range(3)]
    listed = client.files.list(purpose="user_data", limit=2)
    assert [each.id for each in listed.data] == [made[2].id, made[1].id]
    assert [each.id for each in listed] == [each.id for each in reversed(made)]  # its pages follow each other
    assert client.files.content(made[1].id).read() == bytes([1]) * 300_000
    assert client.files.delete(made[1].id).deleted
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        client.files.retrieve(made[1].id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[1].id)
    made_later = client.files.create(
        file=("x", io.BytesIO(b"1")), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made_later.expires_at == made_later.created_at + 3600


def test_what_is_refused(client: openai.OpenAI, server: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Must be \.jsonl"):
        upload(client, chat(1), name="in.txt")
    with pytest.raises(openai.BadRequestError, match="'purpose'"):
        client.files.create(file=("x", b"1"), purpose="fun")  # type: ignore[arg-type]
    file = upload(client, chat(1))
    for changes, text in (
        ({"completion_window": "soon"}, "'completion_window'"),
        ({"endpoint": "/v1/models"}, "'endpoint'"),
        ({"input_file_id": "file-none"}, "No such File object"),
        ({"extra_body": {"color": 1}}, "Unknown parameter: 'color'"),
    ):
        right = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match=text):
            client.batches.create(**{**right, **changes})  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="No batch found"):
        client.batches.retrieve("batch_none")
    assert server.ask("GET", "/v1/batches?limit=0")[0] == 400
    assert server.ask("GET", "/v1/batches?colour=red")[0] == 400
    assert server.ask("DELETE", "/v1/batches")[0] == 405


def test_a_server_without_batches_says_so(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        status, _, body = server.ask("GET", "/v1/batches")
    assert status == 501
    assert "--batches" in json.loads(body)["error"]["message"]


def test_cancelling_keeps_what_is_done(client: openai.OpenAI, server: Serving) -> None:
    file = upload(client, *map(chat, range(5)), chat(9, text="for ever"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    wait(client, batch, lambda now: now.request_counts.completed == 5)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 5)
    assert len(output(client, batch.output_file_id)) == 5
    eventually(lambda: "cancelled by the client" in server.text)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.batches.list(limit=1).data[0].id == batch.id


def test_the_deadline(client: openai.OpenAI) -> None:
    file = upload(client, chat(1), chat(2, text="for ever"))
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="2s",  # type: ignore[arg-type]
    )
    batch = wait(client, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 1, 1)
    (row,) = output(client, batch.error_file_id)
    assert (row["custom_id"], row["response"], row["error"]["code"]) == ("item-2", None, "batch_expired")


def test_without_tenants_items_are_in_the_one_usage_report(client: openai.OpenAI, server: Serving) -> None:
    def used() -> dict[str, int]:
        _, _, body = server.ask("GET", "/v1/usage?group_by=class")
        return {each["class"]: each["requests"] for each in json.loads(body)["data"]}

    before = used().get("idle", 0)
    file = upload(client, *(chat(n) for n in range(7)))
    batch = wait(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h"))
    assert batch.request_counts.completed == 7
    eventually(lambda: used().get("idle", 0) >= before + 7, what="the rows of the items")
    _, _, body = server.ask("GET", "/v2/usage?group_by=tenant")
    assert [each["tenant"] for each in json.loads(body)["data"]] == [""]


def test_metrics(client: openai.OpenAI, server: Serving) -> None:
    file = upload(client, chat(1), chat(2, text="for ever"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    wait(client, batch, lambda now: now.request_counts.completed == 1)
    labels = f'{{batch="{batch.id}",model="words",tenant="default"}}'
    page = server.metrics()
    assert page[f"nerite_batch_items_left{labels}"] == 1
    assert 3500 < page[f"nerite_batch_deadline_seconds{labels}"] <= 3600
    assert page['nerite_batch_items_total{outcome="completed"}'] > 0
    assert page["nerite_batches_open"] == 1
    client.batches.cancel(batch.id)
    wait(client, batch)


def test_no_answer_is_lost_or_doubled_when_the_server_is_killed(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "slow", SLOW.replace("LOG", repr(str(tmp_path / "runs"))), SIMPLE)
    flags = [f"--batches={tmp_path / 'batches.db'}"]
    items = [
        {"custom_id": f"item-{n}", "url": "/v1/completions", "body": {"model": "slow", "prompt": f"text {n}"}}
        for n in range(120)
    ]
    with serving(tmp_path / "models", tmp_path / "log", *flags, clean=False) as server, connected(server) as client:
        file = upload(client, *items)
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait(client, batch, lambda now: now.request_counts.completed >= 40)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with sqlite3.connect(tmp_path / "batches.db") as database:
        rows = database.execute("SELECT custom_id FROM batch_items WHERE state = 'completed'").fetchall()
    committed = {custom_id.replace("item-", "text ") for (custom_id,) in rows}
    assert 40 <= len(committed) < 120
    before = (tmp_path / "runs").read_text().splitlines()
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server, connected(server) as client:
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 120)
        rows = output(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"item-{n}" for n in range(120)]
    assert all(row["response"]["body"]["choices"][0]["text"] == f"TEXT {n}" for n, row in enumerate(rows))
    after = (tmp_path / "runs").read_text().splitlines()[len(before) :]
    assert committed.isdisjoint(after)
    assert {f"text {n}" for n in range(120)} == {*before, *after}


def test_the_limits_of_flags(tmp_path: Path) -> None:
    engine(tmp_path / "models", "words")
    flags = (
        f"--batches={tmp_path / 'batches.db'}",
        f"--batch-files={tmp_path / 'elsewhere'}",
        "--batch-concurrency=3",
        "--batch-storage-bytes=12000",
    )
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server, connected(server) as client:
        with pytest.raises(openai.APIStatusError, match="batch-storage-bytes") as found:
            upload(client, *map(chat, range(100)))
        assert found.value.status_code == 413
        file = upload(client, *(chat(n, text="for ever") for n in range(10)))
        assert (tmp_path / "elsewhere" / file.id).exists()
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="20s")  # type: ignore[arg-type]
        under_way = 'nerite_batch_items_under_way{lane="%s"}'

        def running() -> float:
            page = server.metrics()
            return sum(page[under_way % lane] for lane in ("idle", "raised"))

        eventually(lambda: running() == 3)
        assert {running() for _ in range(50)} == {3}
        client.batches.cancel(batch.id)
        wait(client, batch)


def test_a_polite_stop_keeps_the_batch(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "slow", SLOW.replace("LOG", repr(str(tmp_path / "runs"))), SIMPLE)
    item = {"url": "/v1/completions", "body": {"model": "slow", "prompt": "text"}}
    flags = [f"--batches={tmp_path / 'batches.db'}"]
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server, connected(server) as client:
        file = upload(client, *({**item, "custom_id": str(n)} for n in range(100)))
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait(client, batch, lambda now: now.request_counts.completed >= 10)
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server, connected(server) as client:
        assert wait(client, batch).request_counts.completed == 100


def test_tenants_and_front_processes(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "shout", UPPER, SIMPLE)
    (tmp_path / "policy.toml").write_text(
        '[tenants.acme]\nkeys = ["a-key"]\nrequests_per_minute = 6000\n[tenants.umbrella]\nkeys = ["b-key"]\n'
    )
    flags = (
        f"--batches={tmp_path / 'batches.db'}",
        f"--policy-file={tmp_path / 'policy.toml'}",
        ALL_TENANTS,
        "--front-processes=2",
    )
    with (
        serving(tmp_path / "models", tmp_path / "log", *flags) as server,
        connected(server, "a-key") as acme,
        connected(server, "b-key") as umbrella,
    ):
        item = {"url": "/v1/completions", "body": {"model": "shout", "prompt": "text"}}
        file = upload(acme, *({**item, "custom_id": str(n)} for n in range(20)))
        with pytest.raises(openai.NotFoundError):
            umbrella.files.retrieve(file.id)
        batch = acme.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert wait(acme, batch).request_counts.completed == 20
        assert len(acme.files.list(limit=1).data) == 1
        assert umbrella.batches.list().data == []
        admitted = {(use["tenant"], use["class"]): use["admitted"] for use in server.json("GET", "/v2/quota")["use"]}
        assert admitted == {("acme", "idle"): 20}


TENANTS = '[tenants.alice]\nkeys = ["a-key"]\n[tenants.bob]\nkeys = ["b-key"]\n'
POISON = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"words","messages":'
POISON += b"[" * 300 + b"]" * 300 + b"}}"


def completes(client: openai.OpenAI) -> None:
    """Have a batch complete, for a model that nobody else uses."""
    file = upload(client, *(chat(n, "other") for n in range(5)))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert wait(client, batch).request_counts.completed == 5


def test_poison_of_one_tenant_does_not_stop_others(tmp_path: Path) -> None:
    """Files that could not be loaded, also of batches that were validated before, across restarts."""
    engine(tmp_path / "models", "words")
    engine(tmp_path / "models", "other")
    (tmp_path / "policy.toml").write_text(TENANTS)
    flags = (f"--batches={tmp_path / 'batches.db'}", f"--policy-file={tmp_path / 'policy.toml'}")
    files = []
    with (
        serving(tmp_path / "models", tmp_path / "log", *flags) as server,
        connected(server, "a-key") as alice,
        connected(server, "b-key") as bob,
    ):
        with pytest.raises(openai.BadRequestError, match="Line 1: 'body' is nested deeper than 100 levels"):
            alice.files.create(file=("in.jsonl", POISON), purpose="batch")
        for _ in range(2):
            files.append(upload(alice, *(chat(n, text="for ever") for n in range(200))).id)
            batch = alice.batches.create(input_file_id=files[-1], endpoint=CHAT, completion_window="24h")
            wait(alice, batch, lambda now: now.request_counts.total == 200)
        completes(bob)
    nested, shortened = (tmp_path / "batches.db.files" / name for name in files)
    nested.write_bytes(POISON * 200)
    os.truncate(shortened, 200)
    for _ in range(2):
        with (
            serving(tmp_path / "models", tmp_path / "log", *flags) as server,
            connected(server, "a-key") as alice,
            connected(server, "b-key") as bob,
        ):
            completes(bob)
            for batch in alice.batches.list().data:
                wait(alice, batch, lambda now: now.request_counts.failed == 200 - (now.input_file_id == files[1]))
            assert server.ask("GET", "/v2/health/ready")[0] == 200


@pytest.mark.parametrize("url", ["/v2/models/zz ABC\r\nX-Nerite-Tenant: bob\r\n/infer", "/v2/models/a%2fb/infer"])
def test_the_url_of_an_item_is_a_path(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="'url' must be one of"):
        upload(client, {"custom_id": "one", "url": url, "body": {}})
    file = upload(client, chat(1))
    with pytest.raises(openai.BadRequestError, match="Invalid value for 'endpoint'"):
        client.batches.create(input_file_id=file.id, endpoint=url, completion_window="1h")  # type: ignore[arg-type]


def test_names_without_control_characters(server: Serving) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a\0b"\r\n\r\nx\r\n--x--\r\n'
    status, _, _ = server.ask("POST", "/v1/files", form, content_type="multipart/form-data; boundary=x")
    assert status == 400
    for path in ("/v1/files/a%00b", "/v1/batches/a%00b", "/v1/files/a%00b/content"):
        assert server.ask("GET", path)[0] == 400
    assert server.ask("GET", "/v1/files?after=a%00b")[0] == 400


def test_a_thousand_batches_of_one_tenant_keep_no_other_out(tmp_path: Path) -> None:
    engine(tmp_path / "models", "words")
    engine(tmp_path / "models", "other")
    (tmp_path / "policy.toml").write_text(TENANTS)
    flags = (f"--batches={tmp_path / 'batches.db'}", f"--policy-file={tmp_path / 'policy.toml'}")
    with (
        serving(tmp_path / "models", tmp_path / "log", *flags) as server,
        connected(server, "a-key") as alice,
        connected(server, "b-key") as bob,
    ):
        file = upload(alice, *(chat(n, text="for ever") for n in range(100)))
        new = json.dumps({"input_file_id": file.id, "endpoint": CHAT, "completion_window": "30d"}).encode()
        answers = [server.ask("POST", "/v1/batches", new, authorization="Bearer a-key") for _ in range(1100)]
        assert [status for status, _, _ in answers] == [200] * 500 + [429] * 600
        assert b"tenant 'alice' has 500 batches that have not ended, and may have no more than" in answers[-1][2]
        completes(bob)
