"""Tenants and quotas at a router: over all members, by the tokens that members report."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis_server import redis_server
from routing import ADMIN_KEY, ROUTER, Received, events, pool, response, routing, samples, stand_ins
from serving import PATIENCE, Serving, eventually

POLICY = """
header = "x-tenant"

[classes]
interactive = { order = 0 }
batch = { order = 1 }

[tenants.small]
header_values = ["small"]
class = "interactive"
requests_per_minute = 2

[tenants.words]
header_values = ["words"]
class = "interactive"
output_tokens_per_minute = 100

[tenants.one]
header_values = ["one"]
class = "interactive"
concurrency = 1

[tenants.night]
header_values = ["night"]
class = "batch"
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
INFER = "/v2/models/m/infer"


@contextmanager
def governed(folder: Path, *pools: str) -> Iterator[Serving]:
    """Run a router with the policy."""
    (folder / "policy.toml").write_text(POLICY)
    with routing(folder, *pools, router=f'{ROUTER}policy-file = "policy.toml"\n{ADMIN_KEY}') as router:
        yield router


def left(router: Serving, tenant: str, limit: str) -> int:
    """Return what is left of a quota."""
    quota: dict[str, Any] = router.json("GET", "/v2/quota")
    (found,) = [each for each in quota["tenants"] if each["tenant"] == tenant]
    (rate,) = [each for each in found["rates"] if each["limit"] == limit]
    return int(rate["left"])


def test_quotas_are_over_all_members(tmp_path: Path) -> None:
    with stand_ins(2) as members, governed(tmp_path, pool(*(each.address for each in members))) as router:
        statuses = [router.ask("POST", INFER, b"{}", x_tenant="small")[0] for _ in range(3)]
        assert statuses == [200, 200, 429]
        status, headers, body = router.ask("POST", "/v1/chat/completions", CHAT, x_tenant="small")
        assert status == 429
        assert "tenant 'small'" in json.loads(body)["error"]["message"]
        assert int(headers["Retry-After"]) > 0
        assert router.ask("POST", INFER, b"{}")[0] == 200
        router.follow(tmp_path / "policy.toml", POLICY.replace("requests_per_minute = 2", "requests_per_minute = 20"))
        assert router.ask("POST", INFER, b"{}", x_tenant="small")[0] == 200


def test_answers_are_charged_by_what_members_count(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes:
        if json.loads(asked.body).get("stream"):
            return events("a", "b", '{"usage":{"prompt_tokens":3,"completion_tokens":30}}')
        return response(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}')

    with stand_ins(1, answer) as (member,), governed(tmp_path, pool(member.address)) as router:
        assert router.ask("POST", "/v1/chat/completions", CHAT, x_tenant="words")[0] == 200
        assert 90 <= left(router, "words", "output_tokens_per_minute") <= 94
        assert router.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True}, x_tenant="words")[0] == 200
        assert 60 <= left(router, "words", "output_tokens_per_minute") <= 66


def test_concurrency_ends_with_the_client(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes | None:
        if asked.path != INFER or go.is_set():
            return response()
        while connection.recv(100):
            pass
        return None

    go = threading.Event()
    with stand_ins(1, answer) as (member,), governed(tmp_path, pool(member.address)) as router:
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        connection.request("POST", INFER, b"{}", {"x-tenant": "one"})
        eventually(lambda: len(member.requests) == 1)
        assert router.ask("POST", INFER, b"{}", x_tenant="one")[0] == 429
        assert samples(router, "nerite_admission_running")['nerite_admission_running{model="m"}'] == 1
        go.set()
        connection.close()
        eventually(lambda: router.ask("POST", INFER, b"{}", x_tenant="one")[0] == 200)


def test_the_class_of_a_tenant_leads_to_a_pool(tmp_path: Path) -> None:
    with stand_ins(2) as (day, night):
        pools = pool(day.address), pool(night.address, name="batch", classes=["batch"])
        with governed(tmp_path, *pools) as router:
            assert router.ask("POST", INFER, b"{}", x_tenant="night")[0] == 200
            assert router.ask("POST", INFER, b"{}", x_tenant="small")[0] == 200
            assert (len(day.requests), len(night.requests)) == (1, 1)
            assert router.ask("POST", INFER, b"{}", x_tenant="night", x_nerite_class="interactive")[0] == 400


def test_a_budget_in_money_over_two_routers(tmp_path: Path) -> None:
    def answer(asked: Received, connection: socket.socket) -> bytes:
        return response(b'{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":40}}')

    (tmp_path / "prices.toml").write_text('[[price]]\nmodel = "m"\nprompt-tokens = 1\nanswer-tokens = 2\n')
    settings = f'{ROUTER}policy-file = "../policy.toml"\n'
    with redis_server(tmp_path / "redis") as redis, stand_ins(1, answer) as (member,), ExitStack() as stack:
        (tmp_path / "policy.toml").write_text(
            f'prices = "prices.toml"\n[redis]\nurl = "redis://127.0.0.1:{redis.port}"\n'
            "[default]\nmoney_per_month = 1.0\n"
        )
        routers = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            routers.append(stack.enter_context(routing(tmp_path / name, pool(member.address), router=settings)))
        answers = [routers[number % 2].ask("POST", "/v1/chat/completions", CHAT) for number in range(16)]
    statuses = [status for status, _, _ in answers]
    assert statuses[-2:] == [429, 429]
    assert 8 <= statuses.count(200) <= 11, "each answer costs 0.09"
    error = json.loads(answers[-1][2])["error"]["message"]
    assert "money_per_month of tenant 'default' is 1" in error
    assert "more than is left of the month" in error
