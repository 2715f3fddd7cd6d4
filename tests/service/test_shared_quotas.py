"""Quotas of tenants over three servers and a Redis: under load, and while servers and Redis come to harm."""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_llm import NARROW

from llm_models import language_model
from nerite.admission.lease_book import TICKS, LeaseBook
from redis_server import Redis, redis_server
from serving import ALL_TENANTS, IDENTITY, PATIENCE, Serving, eventually, python_model, serving
from simulated_redis import SimulatedRedis, reply_of

RATE, BURST = 20, 40
"""Requests a second of a tenant, over all servers, and at once."""
POLICY = f"""
header = "x-tenant"

[tenants.acme]
header_values = ["acme"]
requests_per_minute = {60 * RATE}
requests_burst = {BURST}

[tenants.other]
header_values = ["other"]
requests_per_minute = {60 * RATE}
requests_burst = {BURST}
concurrency = 8

[tenants.rich]
header_values = ["rich"]
requests_per_minute = 600_000
concurrency = 100
bytes_per_minute = 1_000_000_000
"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]})


class Load:
    """Clients that send one request after the other to each server, as fast as these answer."""

    def __init__(self, servers: list[Serving], tenant: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.slowest = 0.0
        """Seconds of the slowest answer."""
        self.refusals: set[str] = set()
        self._tenant = tenant
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send, args=(server,)) for server in servers]
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def _send(self, server: Serving) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["HTTPService"], timeout=PATIENCE)
        while not self._over.is_set():
            asked = time.monotonic()
            try:
                connection.request("POST", "/v2/models/identity/infer", BODY, {"x-tenant": self._tenant})
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException):
                server.process.wait(PATIENCE)  # it was killed
                break
            with self._lock:
                self.statuses[answer.status] += 1
                self.slowest = max(self.slowest, time.monotonic() - asked)
                if answer.status != 200:
                    self.refusals.add(json.loads(body)["error"])
        connection.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def admitted(self) -> int:
        with self._lock:
            return self.statuses[200]

    def run(self, seconds: float) -> None:
        """Return when the load has lasted for so long in all."""
        eventually(lambda: self.seconds >= seconds)

    def end(self) -> float:
        """End it; return how many seconds it has lasted."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.seconds


class ServerFleet:
    """Servers that share quotas over one Redis."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        python_model(folder / "models", "identity", IDENTITY)
        (folder / "policy.toml").write_text(POLICY)
        self.redis: Redis = stack.enter_context(redis_server(folder / "redis"))
        self.servers = [self.start(number) for number in range(3)]

    def start(self, number: int) -> Serving:
        flags = (
            f"--policy-file={self._folder / 'policy.toml'}", ALL_TENANTS, f"--quota-redis=redis://127.0.0.1:{self.redis.port}/1"
        )  # fmt: skip
        return self._stack.enter_context(
            serving(self._folder / "models", self._folder / f"log{number}", *flags, clean=False)
        )

    def load(self, tenant: str = "acme") -> Load:
        return Load(self.servers, tenant)

    def all_have(self, metric: str, value: float) -> bool:
        return all(server.metrics()[f"nerite_admission_{metric}"] == value for server in self.servers)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFleet]:
    with ExitStack() as stack:
        yield ServerFleet(tmp_path_factory.mktemp("fleet"), stack)


def test_three_servers_share_a_quota(fleet: ServerFleet) -> None:
    eventually(lambda: fleet.all_have("redis_servers", 3))
    load = fleet.load()
    load.run(4)
    seconds = load.end()
    assert load.statuses.keys() == {200, 429}
    assert load.admitted <= BURST + RATE * seconds + 1
    assert load.admitted >= 0.8 * (BURST + RATE * seconds) - 10
    assert any(
        f"requests_per_minute of tenant 'acme' is {60 * RATE}, now 0 left of {BURST}" in text for text in load.refusals
    )
    assert fleet.all_have("redis_up", 1)
    assert all(server.metrics()["nerite_admission_redis_exchanges"] > 3 for server in fleet.servers)


def test_a_tenant_with_plenty_does_not_wait_for_redis(fleet: ServerFleet) -> None:
    def waits() -> float:
        return sum(server.metrics()["nerite_admission_lease_waits"] for server in fleet.servers)

    before = waits()
    load = fleet.load("rich")
    load.run(3)
    load.end()
    assert load.statuses.keys() == {200}
    assert waits() - before < max(load.admitted / 20, 30), "only while its use grows"
    names = {name for server in fleet.servers for name in server.metrics()}
    assert 'nerite_admission_leased{limit="requests_per_minute",tenant="rich"}' in names


def test_redis_that_stands_still(fleet: ServerFleet) -> None:
    """Requests go on, at once, by what was leased and by each server's third; afterwards it is as before."""
    load = fleet.load("other")
    load.run(1)
    fleet.redis.signal(signal.SIGSTOP)
    try:
        eventually(lambda: fleet.all_have("redis_up", 0))
        load.run(5)
    finally:
        fleet.redis.signal(signal.SIGCONT)
    eventually(lambda: fleet.all_have("redis_up", 1), what="Redis did not come back")
    before = load.seconds
    load.run(before + 2)
    seconds = load.end()
    assert load.statuses.keys() == {200, 429}
    assert load.slowest < 2
    assert load.admitted <= 2 * BURST + RATE * seconds + 3
    assert load.admitted >= 0.6 * RATE * seconds
    assert any("Redis is not reached, so this server admits 0.333 of the quota" in text for text in load.refusals)
    assert all("then this server's share of their quotas: no answer in 100 ms" in each.text for each in fleet.servers)


def test_redis_that_was_killed_and_comes_back_empty(fleet: ServerFleet) -> None:
    load = fleet.load()
    load.run(1)
    fleet.redis.stop()
    eventually(lambda: fleet.all_have("redis_up", 0))
    load.run(3)
    fleet.redis.start()
    eventually(lambda: fleet.all_have("redis_up", 1), what="Redis did not come back")
    load.run(load.seconds + 2)
    seconds = load.end()
    assert load.statuses.keys() == {200, 429}
    assert load.admitted <= 2 * BURST + RATE * seconds + 3
    assert all("reconnected to Redis (127.0.0.1:" in server.text for server in fleet.servers)


def test_a_server_that_is_killed(fleet: ServerFleet) -> None:
    """The last test: what it held is lost, its concurrency is free after a while, and others are told of the end."""
    load = fleet.load("other")
    load.run(1)
    killed = fleet.servers.pop()
    killed.process.kill()
    load.run(3)
    seconds = load.end()
    assert load.admitted <= BURST + RATE * seconds + 1
    eventually(lambda: fleet.all_have("redis_servers", 2))
    ended = fleet.servers.pop()
    ended.process.send_signal(signal.SIGTERM)
    assert ended.process.wait(PATIENCE) == 0
    eventually(lambda: fleet.all_have("redis_servers", 1))


def test_a_redis_that_refuses(tmp_path: Path) -> None:
    """It takes the password and has no memory left: the server admits by itself, and says why."""
    python_model(tmp_path / "models", "identity", IDENTITY)
    policy, environment = tmp_path / "policy.toml", {"NERITE_REDIS_PASSWORD": "a-secret"}
    with redis_server(tmp_path / "redis", "--requirepass", "a-secret", "--maxmemory", "1") as redis:
        policy.write_text(f'[redis]\nurl = "redis://127.0.0.1:{redis.port}"\n[default]\nrequests_per_minute = 2\n')
        flag = f"--policy-file={policy}"
        with serving(tmp_path / "models", tmp_path / "log", flag, environment=environment) as server:
            eventually(lambda: "OOM command not allowed" in server.text)
            for _ in range(2):
                server.infer("identity", [1.0])
            with pytest.raises(RuntimeError, match=r"429: .*so this server admits 1 of the quota"):
                server.infer("identity", [1.0])
            assert server.metrics()["nerite_admission_redis_up"] == 0
            redis.ask_as("a-secret", "CONFIG", "SET", "maxmemory", "0")
            eventually(lambda: server.metrics()["nerite_admission_redis_up"] == 1, what="Redis did not come back")
            redis.ask_as("a-secret", "CONFIG", "SET", "maxmemory", "1")
            eventually(lambda: server.metrics()["nerite_admission_redis_up"] == 0)
            assert server.metrics()["nerite_admission_redis_failures"] == 1
    assert "a-secret" not in server.text


def test_a_budget_of_tokens_over_servers(tmp_path: Path) -> None:
    """It is used up once, by prompts and answers together, though Redis has lost its data on the way."""
    (tmp_path / "models" / "parrot").mkdir(parents=True)
    language_model(tmp_path / "models" / "parrot" / "1")
    (tmp_path / "models" / "parrot" / "config.pbtxt").write_text(NARROW)
    policy = tmp_path / "policy.toml"
    said = {"text_input": "once", "parameters": {"max_tokens": 10, "ignore_eos": True}}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        policy.write_text(f'[redis]\nurl = "redis://127.0.0.1:{redis.port}"\n[default]\ntokens_per_month = 300\n')
        servers = [
            stack.enter_context(
                serving(tmp_path / "models", tmp_path / f"log{number}", f"--policy-file={policy}", ALL_TENANTS)
            )
            for number in range(2)
        ]

        def ask(number: int) -> tuple[int, bytes]:
            status, _, body = servers[number].ask("POST", "/v2/models/parrot/generate", said)
            return status, body

        def spent() -> int:
            uses = [use for server in servers for use in server.json("GET", "/v2/quota")["use"]]
            return sum(use["input_tokens"] + use["output_tokens"] for use in uses)

        assert [ask(number % 2)[0] for number in range(10)] == [200] * 10
        redis.stop()
        redis.start()
        eventually(lambda: all(server.metrics()["nerite_admission_redis_up"] == 1 for server in servers))
        answers = [ask(number % 2) for number in range(40)]
        assert {status for status, _ in answers} == {200, 429}
        assert any(b"tokens_per_month of tenant 'default' is 300" in body for _, body in answers)
        eventually(lambda: 270 <= spent() <= 300 and {ask(number)[0] for number in range(2)} == {429})
        assert spent() <= 300


def test_the_script_does_what_the_simulation_does(tmp_path: Path) -> None:
    """Buckets that do not refill, and concurrency: their replies are the same at whatever time."""
    chance = random.Random(20_261_126)
    with redis_server(tmp_path / "redis") as redis:
        simulated = SimulatedRedis()
        books = [LeaseBook(f"s{number}", lambda: None, 0, "2026-11") for number in range(3)]
        now = 0
        for step in range(400):
            now += 300_000_000
            book = chance.choice(books)
            if book.away:
                book.connected()
            lease = book.monthly_quota("acme", "budget", 10_000, now)
            places = book.concurrency("acme", "concurrency", 6, now)
            if not lease.pending(count := chance.randint(1, 200), now) and lease.until(count, now) == 0:
                lease.take(count, now)
            if chance.random() < 0.2:
                lease.give_back(chance.randint(0, min(lease.used, 50)), now)
            if not places.pending(1, now) and places.until(now) == 0:
                places.take(now)
            elif places.used and chance.random() < 0.7:
                places.leave(now)
            if step % 130 == 129:
                redis.ask("FLUSHALL")
                simulated.flush()
            for _ in range(TICKS):
                book.tick(now, "2026-11")
            while (command := book.exchange(now)) is not None:
                reply = reply_of(redis.ask(*command))
                assert reply == simulated.execute(command)
                book.answered(reply, now)
    assert sum(book.monthly_quota("acme", "budget", 10_000, now).used for book in books) > 5000
