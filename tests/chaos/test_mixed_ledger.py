"""The ledger's equation after a mixed load through a router: cancels, retries, refusals, dead workers, dead servers.

``NERITE_TEST_MIXED_SECONDS=3600`` makes an hour of it (``make soak``).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llm_models import language_model
from nerite.ledger.tables import Equation, LedgerSchema, equations
from nerite.storage.database import Database, Transaction
from ports import free_ports
from routing import ROUTER, pool, routing
from serving import ALL_TENANTS, IDENTITY, PATIENCE, Serving, ensemble, eventually, pbtxt, python_model, serving, step

SECONDS = float(os.environ.get("NERITE_TEST_MIXED_SECONDS", "20"))
CRASHES = max(1, int(SECONDS / 300))
"""How often a server is killed."""
TOLERANCE = 0.005
POLICY = """
header = "x-tenant"
[tenants.acme]
header_values = ["acme"]
[tenants.other]
header_values = ["other"]
concurrency = 2
"""
TALKS = 'backend: "llm"\nparameters { key: "MAX_NUM_SEQS" value { string_value: "4" } }\n'
WORKS = """
def execute(self, requests):
    time.sleep(0.01)
    if any(pb_utils.get_input_tensor_by_name(each, "INPUT0").as_numpy()[0][0] == 13 for each in requests):
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


class MeteredServer:
    """A server with a ledger, on a port of its own, which is killed and started again."""

    def __init__(self, stack: ExitStack, folder: Path, name: str) -> None:
        (self._port,) = free_ports(1)
        self.ledger = folder / f"{name}.db"
        self._stack, self._folder, self._name = stack, folder, name
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start it, with the ledger that it had."""
        self._starts += 1
        flags = (
            f"--http-port={self._port}", f"--ledger={self.ledger}", f"--policy-file={self._folder / 'policy.toml'}",
            "--cache-config=local,size=1000000", ALL_TENANTS,
        )  # fmt: skip
        log = self._folder / f"{self._name}-{self._starts}.log"
        self.serving: Serving = self._stack.enter_context(serving(self._folder / "models", log, *flags, clean=False))

    def crash(self) -> None:
        """Kill it as a power failure would, and start it again."""
        self.serving.process.kill()
        self.serving.process.wait()
        self.start()

    def read(self, what: Any) -> Any:
        """Return what a function of a transaction finds in the ledger."""
        database = Database(str(self.ledger), [LedgerSchema()])
        try:
            return database.call(what)
        finally:
            database.close()

    def balance(self) -> Equation:
        """Return the equation of all models, over all its lives."""
        self.serving.json("GET", "/v2/usage")
        found = self.read(partial(equations, first_day=0, end_day=10**6))
        return Equation("all", *(sum(column) for column in list(zip(*found, strict=True))[1:]))

    def endings(self) -> Counter[str]:
        """Return the requests of clients by how they ended."""

        def count(transaction: Transaction) -> list[Any]:
            return transaction.rows(
                "SELECT ending, SUM(requests) FROM ledger_rows WHERE origin = 'client' GROUP BY ending", []
            )

        return Counter({str(ending): int(requests) for ending, requests in self.read(count)})


def models(folder: Path) -> None:
    """Write tensor models, an ensemble, and a language model."""
    python_model(folder, "works", WORKS)
    python_model(folder, "cached", IDENTITY, pbtxt(more="dynamic_batching {}\nresponse_cache { enable: true }"))
    ensemble(folder, "chain", step("cached", "INPUT0", "between"), step("works", "between", "OUTPUT0"))
    (folder / "talks").mkdir(parents=True)
    language_model(folder / "talks" / "1")
    (folder / "talks" / "config.pbtxt").write_text(TALKS)


class MixedClient(threading.Thread):
    """Sends requests of all kinds; tries again what failed, and leaves some answers unread."""

    def __init__(self, router: Serving, seed: int, over: threading.Event) -> None:
        super().__init__()
        self._router, self._over = router, over
        self._rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.start()

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            tenant = self._rng.choice(("acme", "other"))
            kind = self._rng.random()
            if kind < 0.1:
                self._leave(tenant)
            elif kind < 0.3:
                said = {"max_tokens": self._rng.randint(1, 60), "ignore_eos": True}
                self._ask(
                    "talks/generate", {"text_input": "once " * self._rng.randint(1, 30), "parameters": said}, tenant
                )
            else:
                model = self._rng.choice(("works", "cached", "chain"))
                value = 13.0 if model == "works" and self._rng.random() < 0.01 else float(self._rng.randint(20, 60))
                tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
                self._ask(f"{model}/infer", {"inputs": [tensor]}, tenant)

    def _ask(self, path: str, body: dict[str, Any], tenant: str) -> None:
        headers = {"x-tenant": tenant, "idempotency-key": f"{self._rng.getrandbits(60)}"}
        for attempt in range(3):
            status = self._send(path, body, {**headers, "x-stainless-retry-count": str(attempt)})
            self.ends[status] += 1
            if status == "200":
                break
            self._over.wait(0.02)

    def _send(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        connection = http.client.HTTPConnection(self._router.http, timeout=PATIENCE)
        try:
            connection.request("POST", f"/v2/models/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except (OSError, http.client.HTTPException):  # a server died in the middle of its answer
            return "lost"
        finally:
            connection.close()

    def _leave(self, tenant: str) -> None:
        """Begin to read a long answer, and go."""
        connection = http.client.HTTPConnection(self._router.http, timeout=PATIENCE)
        said = {"text_input": "once", "stream": True, "parameters": {"max_tokens": 2000, "ignore_eos": True}}
        try:
            connection.request("POST", "/v2/models/talks/generate_stream", json.dumps(said), {"x-tenant": tenant})
            answer = connection.getresponse()
            answer.read(self._rng.randint(1, 200))
            answer.close()  # it holds the socket, too
            self.ends["left"] += 1
        except (OSError, http.client.HTTPException):
            self.ends["lost"] += 1
        finally:
            connection.close()


@pytest.mark.timeout(180 + 2 * SECONDS)
def test_it_adds_up_after_a_mixed_time(tmp_path: Path) -> None:
    models(tmp_path / "models")
    (tmp_path / "policy.toml").write_text(POLICY)
    over = threading.Event()
    with ExitStack() as stack:
        servers = [MeteredServer(stack, tmp_path, name) for name in ("first", "second")]
        addresses = [each.serving.http for each in servers]
        router = stack.enter_context(
            routing(tmp_path, pool(*addresses, health_interval="1s"), router=f'{ROUTER}policy-file = "policy.toml"\n')
        )
        clients = [MixedClient(router, seed, over) for seed in range(6)]
        stack.callback(over.set)
        began = time.monotonic()
        for crash in range(CRASHES):
            moment = SECONDS * (crash + 0.5) / CRASHES
            eventually(lambda moment=moment: time.monotonic() - began > moment, SECONDS + 45)
            engines = servers[(crash + 1) % 2].serving.workers()
            os.kill(next(pid for name, pid in engines.items() if name.startswith("talks")), signal.SIGKILL)
            servers[crash % 2].crash()
        eventually(lambda: time.monotonic() - began > SECONDS, SECONDS + 45)
        over.set()
        for each in clients:
            each.join(PATIENCE)
        ends: Counter[str] = sum((each.ends for each in clients), Counter())
        answered: Counter[str] = sum((each.endings() for each in servers), Counter())
        for each in servers:
            told = each.balance()
            print(each.ledger.name, told, f"{told.share:.6%}")
            assert told.rows > 0 and abs(told.share) < TOLERANCE, told
        print(dict(ends), dict(answered))
        assert min(ends[kind] for kind in ("200", "left", "500", "429")) > 0, ends
        assert min(answered[kind] for kind in ("answered", "cancelled", "failed")) > 0, answered
        # What a killed server has not written is at most what it did in its last second; of a busy machine, some more.
        lost = ends["200"] - answered["answered"] - answered["cached"] - answered["joined"]
        assert lost <= 4 * CRASHES * ends["200"] / SECONDS, (ends, answered)
