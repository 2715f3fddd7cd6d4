"""A budget of tokens over three routers and a Redis: load far beyond it, also while Redis is killed and comes back."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from redis_server import Redis, redis_server
from routing import ROUTER, Received, pool, response, routing, stand_ins
from serving import PATIENCE, Serving, eventually

RATE, BURST = 400, 1200
"""Tokens of answers a second of a tenant, over all routers, and at once."""
ANSWER = 40
"""Tokens of each answer."""
CLIENTS = 2
"""Of each router."""
POLICY = f"""
header = "x-tenant"

[tenants.acme]
header_values = ["acme"]
output_tokens_per_minute = {60 * RATE}
output_tokens_burst = {BURST}
"""
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": ANSWER})
USED = response(
    json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": ANSWER}}).encode()
)  # fmt: skip


def answer(asked: Received, connection: socket.socket) -> bytes:
    time.sleep(0.01)  # as long as a fast model needs
    return USED


class TenantLoad:
    """Clients of one tenant at all routers, which ask for far more than there is."""

    def __init__(self, routers: list[Serving]) -> None:
        self.statuses: Counter[int] = Counter()
        self.slowest = 0.0
        """Seconds of the slowest answer."""
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._send, args=(router,)) for router in routers for _ in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, router: Serving) -> None:
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        while not self._over.is_set():
            asked = time.monotonic()
            connection.request("POST", "/v1/chat/completions", CHAT, {"x-tenant": "acme"})
            got = connection.getresponse()
            got.read()
            with self._lock:
                self.statuses[got.status] += 1
                self.slowest = max(self.slowest, time.monotonic() - asked)
            if got.status == 429:
                self._over.wait(0.02)
        connection.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def last(self, seconds: float) -> None:
        """Return when the load has lasted for so many seconds more."""
        until = self.seconds + seconds
        eventually(lambda: self.seconds >= until)

    def end(self) -> float:
        """End it; return how many seconds it has lasted."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.seconds


class RouterFleet:
    """Three routers before the same two members."""

    def __init__(self, routers: list[Serving], members: list[list[Received]], redis: Redis) -> None:
        self.routers = routers
        self.redis = redis
        self._members = members

    @property
    def tokens(self) -> int:
        """Tokens that members have generated."""
        return ANSWER * sum(map(len, self._members))

    def all_have(self, metric: str, value: float) -> bool:
        """Return whether a metric of admission control has this value at all routers."""
        return all(router.metrics()[f"nerite_admission_{metric}"] == value for router in self.routers)


@contextmanager
def fleet(folder: Path) -> Iterator[RouterFleet]:
    """Run it, and a Redis."""
    (folder / "policy.toml").write_text(POLICY)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder / "redis"))
        members = stack.enter_context(stand_ins(2, answer))
        settings = f'{ROUTER}policy-file = "../policy.toml"\nredis = "redis://127.0.0.1:{redis.port}/1"\n'
        routers = []
        for number in range(3):
            own = folder / f"router{number}"
            own.mkdir()
            addresses = [each.address for each in members]
            routers.append(stack.enter_context(routing(own, pool(*addresses), router=settings)))
        running = RouterFleet(routers, [each.requests for each in members], redis)
        for router in routers:  # it shares quotas once a request has come
            assert router.ask("POST", "/v1/chat/completions", CHAT.encode())[0] == 200
        eventually(lambda: running.all_have("redis_servers", 3))
        for each in members:
            each.requests.clear()
        yield running


def test_a_budget_is_not_overspent(tmp_path: Path) -> None:
    with fleet(tmp_path) as three:
        load = TenantLoad(three.routers)
        load.last(8)
        seconds = load.end()
        assert load.statuses.keys() == {200, 429}
        under_way = 3 * CLIENTS * ANSWER
        assert three.tokens <= BURST + RATE * seconds + under_way
        assert three.tokens >= 0.7 * (BURST + RATE * seconds)
        assert three.all_have("redis_up", 1)


@pytest.mark.timeout(180)
def test_redis_is_killed_and_started_again(tmp_path: Path) -> None:
    with fleet(tmp_path) as three:
        load = TenantLoad(three.routers)
        load.last(3)
        three.redis.stop()
        eventually(lambda: three.all_have("redis_up", 0))
        load.last(4)
        three.redis.start()
        eventually(lambda: three.all_have("redis_up", 1), what="Redis did not come back")
        load.last(4)
        seconds = load.end()
        assert load.statuses.keys() == {200, 429}
        assert load.slowest < 2
        under_way = 3 * CLIENTS * ANSWER
        # docs/admission.md: in the worst case once more the burst, and a request of each router.
        assert three.tokens <= 2 * BURST + RATE * seconds + 3 * ANSWER + under_way
        assert three.tokens >= 0.6 * RATE * seconds
