"""The ledger of a router: a row for each request, whatever the member is, and each request is billed once."""

from __future__ import annotations

import http.client
import json
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from test_llm import NARROW

from llm_models import language_model
from nerite.core.item_attempt import new_attempt, new_batch_id
from nerite.ledger.tables import LedgerSchema, sums
from nerite.storage.database import Database
from postgres_server import postgres_server
from routing import ADMIN_KEY, ROUTER, Received, events, pool, response, routing, stand_ins
from serving import IDENTITY, NERITE, PATIENCE, Serving, eventually, python_model, serving

CHAT = "/v1/chat/completions"
INFER = "/v2/models/m/infer"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
POLICY = """
header = "x-tenant"
[classes]
interactive = { order = 0 }
batch = { order = 1 }
[tenants.acme]
header_values = ["acme"]
class = "interactive"
[tenants.night]
header_values = ["night"]
class = "batch"
requests_per_minute = 1
"""
USAGE = '{"usage":{"prompt_tokens":9,"completion_tokens":30,"prompt_tokens_details":{"cached_tokens":4}}}'


@contextmanager
def ledgered(folder: Path, *pools: str, more: str = ADMIN_KEY, clean: bool = True) -> Iterator[Serving]:
    """Run a router with a ledger and the policy."""
    (folder / "policy.toml").write_text(POLICY)
    settings = f'{ROUTER}policy-file = "policy.toml"\nledger = "router.db"\n{more}'
    with routing(folder, *pools, router=settings, clean=clean) as router:
        yield router


def rows(router: Serving, folder: Path) -> list[dict[str, Any]]:
    """Return all rows in the order of their requests."""
    router.json("GET", "/v2/usage")  # writes what has come
    with closing(sqlite3.connect(folder / "router.db")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM ledger_rows ORDER BY number")]


BEGUN = '{"type":"message_start","message":{"usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":0}}}'
ENDED = (
    '{"type":"message_delta","usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,'
    '"output_tokens":30}}'
)
RESPONSE = b'{"tools":[],"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":30}}'


def test_tokens_of_what_agents_speak(tmp_path: Path) -> None:
    """Members count them under other names, and Anthropic's API leaves out of a prompt what was cached."""

    def answer(asked: Received, connection: socket.socket) -> bytes:
        return response(RESPONSE) if asked.path == "/v1/responses" else events(BEGUN, "a", "b", ENDED)

    with stand_ins(1, answer) as (member,), ledgered(tmp_path, pool(member.address, kind="vllm")) as router:
        assert router.ask("POST", "/v1/messages", {**ASKED, "stream": True}, x_tenant="acme")[0] == 200
        assert router.ask("POST", "/v1/responses", {"model": "m", "input": "hi"}, x_tenant="acme")[0] == 200
        found = rows(router, tmp_path)
    counts = [(row["prompt_tokens"], row["cached_tokens"], row["answer_tokens"]) for row in found]
    assert counts == [(9, 4, 30)] * 2


def test_tokens_whose_count_comes_in_pieces(tmp_path: Path) -> None:
    """A network cuts a stream anywhere, and some servers count before they answer."""
    whole = events("a", USAGE, "[DONE]")
    cuts = [whole.index(text) + skipped for text, skipped in ((b'"prompt', 9), (b"30", 1), (b"cached_tokens", 6))]
    parts: dict[str, threading.Event] = {}

    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        said = json.loads(asked.body)
        if asked.path == "/v1/rerank":
            return response(b'{"usage":{"prompt_tokens":7,"total_tokens":7},"results":[%b1]}' % (b"1," * 2000))
        cut = cuts[int(said["user"])]
        connection.sendall(whole[:cut])
        parts[said["user"]].wait(PATIENCE)
        return whole[cut:]

    with stand_ins(1, answer) as (member,), ledgered(tmp_path, pool(member.address, kind="vllm")) as router:
        for number, cut in enumerate(cuts):
            parts[str(number)] = threading.Event()
            body = json.dumps({**ASKED, "stream": True, "user": str(number)})
            fields = f"Host: localhost\r\nx-tenant: acme\r\nContent-Length: {len(body)}"
            with socket.create_connection(("127.0.0.1", router.ports["HTTPService"]), PATIENCE) as client:
                client.sendall(f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode())
                got, began = b"", whole.index(b"\r\n\r\n") + 4
                while len(got.partition(b"\r\n\r\n")[2]) < cut - began:
                    got += client.recv(65536)
                parts[str(number)].set()
                while not got.endswith(b"0\r\n\r\n"):
                    got += client.recv(65536)
        assert router.ask("POST", "/v1/rerank", {"model": "m", "query": "a"}, x_tenant="acme")[0] == 200
        found = rows(router, tmp_path)
    counts = [(row["prompt_tokens"], row["cached_tokens"], row["answer_tokens"]) for row in found]
    assert counts == [(9, 4, 30)] * 3 + [(7, 0, 0)]


def test_answers_that_are_counted_are_not_compressed(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), ledgered(tmp_path, pool(member.address)) as router:
        for path in (CHAT, INFER):
            router.ask("POST", path, ASKED, x_tenant="acme", accept_encoding="gzip")
    assert [asked.headers.get("accept-encoding") for asked in member.requests] == [None, "gzip"]


def test_every_request_has_a_row(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        if asked.method == "GET":
            return response()
        if asked.path == "/v1/embeddings":
            return response(b'{"data":[],"usage":{"prompt_tokens":5,"total_tokens":5}}')
        if asked.path == INFER:
            return response() if asked.body == b"{}" else response(status=400)
        said = json.loads(asked.body)
        if said.get("user") == "wait":
            while connection.recv(100):
                pass
            return None
        return events("a", "b", "c", USAGE if said.get("user") == "count" else "[DONE]")

    with stand_ins(1, answer) as (member,), ledgered(tmp_path, pool(member.address, kind="vllm")) as router:
        assert router.ask("POST", CHAT, {**ASKED, "stream": True, "user": "count"}, x_tenant="acme")[0] == 200
        assert router.ask("POST", CHAT, {**ASKED, "stream": True}, x_tenant="acme")[0] == 200
        assert router.ask("POST", "/v1/embeddings", {"model": "m", "input": "a"}, x_tenant="acme")[0] == 200
        assert router.ask("POST", INFER, b"{}", x_tenant="night")[0] == 200
        assert router.ask("POST", INFER, b"{}", x_tenant="night")[0] == 429
        assert router.ask("POST", INFER, b"[]", x_tenant="acme")[0] == 400
        client = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        client.request("POST", CHAT, json.dumps({**ASKED, "user": "wait"}), {"x-tenant": "acme"})
        eventually(lambda: b"wait" in member.requests[-1].body)
        client.close()
        eventually(lambda: router.metrics()['nerite_router_under_way{pool="main"}'] == 0)
        assert router.ask("GET", "/v2/models/m")[0] == 200, "what concerns no execution has no row"
        found = rows(router, tmp_path)
    assert [(row["tenant"], row["class"], row["ending"]) for row in found] == [
        ("acme", "interactive", "answered"),
        ("acme", "interactive", "answered"),
        ("acme", "interactive", "answered"),
        ("night", "batch", "answered"),
        ("night", "", "refused"),
        ("acme", "interactive", "refused"),
        ("acme", "interactive", "cancelled"),
    ]
    tokens = [(row["prompt_tokens"], row["cached_tokens"], row["answer_tokens"]) for row in found]
    assert tokens == [(9, 4, 30), (0, 0, 4), (5, 0, 0), *[(0, 0, 0)] * 4]
    assert {row["member"] for row in found} == {member.address, ""}
    assert {(row["source"], row["model"], row["requests"]) for row in found} == {("router", "m", 1)}
    assert [row["attempts"] for row in found] == [1, 1, 1, 1, 0, 1, 1]
    assert all(0 < row["first_byte_seconds"] <= row["ended"] - row["started"] + 1e-6 for row in found[:4])
    assert len({row["request_id"] for row in found}) == len(found)


def test_attempts_at_several_members_are_one_row(tmp_path: Path) -> None:
    with stand_ins(2) as members, ledgered(tmp_path, pool(*(each.address for each in members))) as router:
        members[0].answer = lambda asked, connection: response(status=503)
        for _ in range(6):
            assert router.ask("POST", INFER, b"{}", x_tenant="acme")[0] == 200
        found = rows(router, tmp_path)
    assert len(found) == 6
    assert {row["member"] for row in found} == {members[1].address}
    assert found[0]["attempts"] + found[1]["attempts"] > 2


def test_usage_at_the_router(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), ledgered(tmp_path, pool(member.address)) as router:
        router.ask("POST", INFER, b"{}", x_tenant="acme")
        router.ask("POST", INFER, b"{}", x_tenant="night")
        _, _, body = router.ask("GET", "/v1/usage?group_by=pool,member", x_tenant="acme")
        (own,) = json.loads(body)["data"]
        assert (own["pool"], own["member"], own["requests"]) == ("main", member.address, 1)
        found = router.json("GET", "/v2/usage?group_by=tenant")["data"]
        assert {each["tenant"]: each["requests"] for each in found} == {"acme": 1, "night": 1}
        status, _, body = router.ask("GET", "/v1/usage?group_by=password", x_tenant="acme")
        assert status == 400
        assert "group_by" in json.loads(body)["error"]["message"]
        assert router.metrics()["nerite_ledger_rows_total"] == 2


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "router.db")
        return
    with postgres_server(tmp_path / "postgres") as location:
        yield location


def test_a_name_with_control_characters_stops_nobody_s_rows(database: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    settings = f'{ROUTER}policy-file = "policy.toml"\nledger = "{database}"\n'
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address), router=settings) as router:
        for name in ("a\0b", "a\nb", "a\x1b[2J", "a\u2028b", "a\x85b"):
            status, _, body = router.ask("POST", "/v1/completions", {"model": name, "prompt": "hi"})
            assert (status, b"has the control character U+" in body) == (400, True)
            assert router.ask("POST", f"/v2/models/{quote(name)}/infer", b"{}")[0] in (400, 404)
            with grpcclient.InferenceServerClient(router.grpc) as client:
                tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(
                    np.ones((1, 1), np.float32)
                )
                for asked in ({"model_name": name}, {"model_name": "m", "model_version": name}):
                    with pytest.raises(grpcclient.InferenceServerException, match="has the control character U"):
                        client.infer(inputs=[tensor], **asked)
        for number in range(50):
            assert router.ask("POST", "/v1/completions", {"model": f"junk-{number}", "prompt": "hi"})[0] == 404
        assert router.ask("POST", INFER, b"{}", x_tenant="night")[0] == 200
        status, _, body = router.ask("GET", "/v1/usage?group_by=model", x_tenant="night")
        assert [(each["model"], each["requests"]) for each in json.loads(body)["data"]] == [("m", 1)]
        assert router.ask("POST", INFER, b"{}", x_tenant="acme")[0] == 200
    ledger = Database(database, [LedgerSchema()])
    found = ledger.call(partial(sums, start=0, end=9e9, group_by=["tenant", "model"]))
    ledger.close()
    assert {(each.group["tenant"], each.group["model"]): each.amounts.requests for each in found} == {
        ("acme", "m"): 1,
        ("night", "m"): 1,
    }


def test_what_concerns_all_tenants_needs_the_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    more = 'admin-key = "X-Admin-Key=@keys"\n'
    with stand_ins(1) as (member,), ledgered(tmp_path, pool(member.address), more=more) as router:
        router.ask("POST", INFER, b"{}", x_tenant="acme")
        for path in ("/v2/usage", "/v2/quota"):
            for headers in ({}, {"x_tenant": "nobody"}, {"x_admin_key": "two"}):
                assert router.ask("GET", path, **headers)[0] == 403
            assert router.ask("GET", path, x_admin_key="one")[0] == 200
            assert router.ask("GET", path, x_tenant="acme")[0] == 200
        assert router.ask("GET", "/v1/usage", x_tenant="acme")[0] == 200
        router.follow(tmp_path / "keys", "two\n")
        eventually(lambda: router.ask("GET", "/v2/usage", x_admin_key="two")[0] == 200)
        assert router.ask("GET", "/v2/usage", x_admin_key="one")[0] == 403


def test_without_a_key_a_tenant_sees_its_own_figures_and_nobody_else_any(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), ledgered(tmp_path, pool(member.address), more="") as router:
        for tenant in ("acme", "acme", "night"):
            assert router.ask("POST", INFER, b"{}", x_tenant=tenant)[0] == 200
        for path in ("/v2/usage?group_by=tenant", "/v2/quota"):
            for headers in ({}, {"x_tenant": "nobody"}, {"x_nerite_tenant": "acme"}):
                status, _, body = router.ask("GET", path, **headers)
                assert status == 403
                assert b"add admin-key to [router] of the cluster file" in body
        _, _, body = router.ask("GET", "/v2/usage?group_by=tenant", x_tenant="acme")
        assert [(each["tenant"], each["requests"]) for each in json.loads(body)["data"]] == [("acme", 2)]
        told = json.loads(router.ask("GET", "/v2/quota", x_tenant="night")[2])
        assert {each["tenant"] for part in told.values() for each in part} == {"night"}


def test_files_with_keys_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[router]\nadmin-key = "X-Admin-Key=@none"\n[[pool]]\nname = "a"\nmembers = ["h:1"]\n')
    done = subprocess.run([str(NERITE), "route", "--check", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"the key file '{tmp_path / 'none'}'" in done.stderr


def test_clients_cannot_say_what_routers_say(tmp_path: Path) -> None:
    item = new_attempt(new_batch_id(), 1)
    forged = {"x_nerite_tenant": "night", "x_nerite_router_key": "guess", "x_nerite_request": item}
    forged["x_nerite_paid"] = "1"
    with stand_ins(1) as (member,), ledgered(tmp_path, pool(member.address)) as router:
        assert router.ask("POST", INFER, b"{}", x_tenant="acme", **forged)[0] == 200
        assert router.ask("POST", INFER, b"{}", x_tenant="acme", **forged)[0] == 200
        found = rows(router, tmp_path)
    assert "x-nerite-tenant" not in member.requests[0].headers
    assert "x-nerite-router-key" not in member.requests[0].headers
    assert "x-nerite-paid" not in member.requests[0].headers
    assert {row["ending"] for row in found} == {"answered"}
    assert [asked.headers["x-nerite-request"] for asked in member.requests] == [row["request_id"] for row in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """A server with a ledger of its own, which believes a router."""
    folder = tmp_path_factory.mktemp("server")
    python_model(folder / "models", "identity", IDENTITY)
    (folder / "models" / "talks").mkdir(parents=True)
    language_model(folder / "models" / "talks" / "1")
    (folder / "models" / "talks" / "config.pbtxt").write_text(NARROW)
    (folder / "keys").write_text("# of the router\na-secret\n")
    flags = (f"--ledger={folder / 'server.db'}", f"--router-key-file={folder / 'keys'}")
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running, folder


def bill(*flags: str | Path) -> Any:
    done = subprocess.run([NERITE, "bill", "--format", "json", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_each_request_is_billed_once_and_both_ledgers_agree(server: tuple[Serving, Path], tmp_path: Path) -> None:
    running, folder = server
    member = f'[[pool]]\nname = "main"\nmembers = [{{ http = "{running.http}", grpc = "{running.grpc}" }}]\n'
    text = {"model": "talks", "prompt": "once upon a time", "max_tokens": 12, "temperature": 0}
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    key = f"member-key-file = '{folder / 'keys'}'\n"
    with ledgered(tmp_path, member, more=ADMIN_KEY + key) as router:
        for _ in range(3):
            assert router.ask("POST", "/v1/completions", text, x_tenant="acme")[0] == 200
        stream = {**text, "stream": True, "stream_options": {"include_usage": True}}
        assert router.ask("POST", "/v1/completions", stream, x_tenant="acme")[0] == 200
        router.infer("identity", [[1.0]])
        with grpcclient.InferenceServerClient(router.grpc) as client:
            client.infer("identity", [tensor], headers={"x-tenant": "night"})
        found = rows(router, tmp_path)
    assert {row["source"] for row in found} == {"copy"}
    assert len(found) == 6
    assert running.ask("POST", "/v1/completions", text)[0] == 200  # not through the router
    usage = running.json("GET", "/v2/usage?group_by=tenant")["data"]
    assert {each["tenant"]: each["requests"] for each in usage} == {"acme": 4, "default": 2, "night": 1}
    ledgers = "--ledger", tmp_path / "router.db", "--ledger", folder / "server.db"
    lines = {line["tenant"]: line for line in bill(*ledgers)}
    assert {tenant: line["requests"] for tenant, line in lines.items()} == {"acme": 4, "default": 2, "night": 1}
    assert lines["acme"]["answer_tokens"] == 4 * 12
    assert lines["acme"]["busy_seconds"] > 0
    assert bill(*ledgers, "--reconcile") == {"compared": 6, "differences": []}
    with closing(sqlite3.connect(tmp_path / "router.db")) as database, database:
        database.execute("UPDATE ledger_rows SET answer_tokens = 13 WHERE number = 1")
        database.execute("UPDATE ledger_rows SET tenant = 'night' WHERE number = 2")
        database.execute("DELETE FROM ledger_rows WHERE number = 3")
        database.execute("UPDATE ledger_rows SET request_id = 'lost' WHERE number = 4")
    differences = {
        (each["what"], each["router"], each["server"]) for each in bill(*ledgers, "--reconcile")["differences"]
    }
    assert differences == {
        ("answer tokens", "13", "12"),
        ("tenant", "night", "acme"),
        ("no row of a router", "", "answered"),
        ("no row of a server", "answered", ""),
    }


def test_a_server_believes_routers_with_a_key_alone(server: tuple[Serving, Path]) -> None:
    running, _ = server
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    path = "/v2/models/identity/infer"
    for headers in ({"x_nerite_tenant": "acme"}, {"x_nerite_tenant": "acme", "x_nerite_router_key": "guess"}):
        status, _, text = running.ask("POST", path, body, **headers)
        assert status == 403
        assert b"--router-key-file" in text
    told = {"x_nerite_tenant": "acme", "x_nerite_router_key": "a-secret"}
    assert running.ask("POST", path, body, **told)[0] == 200
    assert running.ask("POST", path, body, x_nerite_paid="1")[0] == 403
    batch = new_batch_id()
    for headers, repeated in (({}, 0), (told, 1)):
        for _ in range(2):
            assert running.ask("POST", path, body, **headers, x_nerite_request=new_attempt(batch, 1))[0] == 200
        usage = running.json("GET", "/v2/usage?group_by=ending")["data"]
        assert sum(each["requests"] for each in usage if each["ending"] == "repeated") == repeated
    with grpcclient.InferenceServerClient(running.grpc) as client:
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
        with pytest.raises(grpcclient.InferenceServerException, match="router-key-file"):
            client.infer("identity", [tensor], headers={"x-nerite-tenant": "acme"})


def test_front_processes_believe_routers_too(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    (tmp_path / "keys").write_text("a-secret\n")
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    told = {"x_nerite_tenant": "acme", "x_nerite_router_key": "a-secret", "x_nerite_request": "ff-1"}
    flags = f"--ledger={tmp_path / 'router.db'}", f"--router-key-file={tmp_path / 'keys'}", "--front-processes=2"
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        for _ in range(4):
            assert server.ask("POST", "/v2/models/identity/infer", body, **told)[0] == 200
        assert server.ask("POST", "/v2/models/identity/infer", body, x_nerite_tenant="acme")[0] == 403
        server.follow(tmp_path / "keys", "another\n")
        assert server.ask("POST", "/v2/models/identity/infer", body, **told)[0] == 403
        found = rows(server, tmp_path)
    assert {(row["tenant"], row["request_id"], row["source"]) for row in found} == {("acme", "ff-1", "server")}
    assert len(found) == 4


def test_without_a_ledger_there_is_no_usage(tmp_path: Path) -> None:
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address)) as router:
        status, _, body = router.ask("GET", "/v1/usage")
        assert status == 400
        assert "add ledger to [router]" in json.loads(body)["error"]["message"]
