"""An item that was answered when a server or router dies, but not committed: answered once in the end, and paid once.

The moment is made certain: the test holds the lock of the batches' database, so that no answer can be committed, until
the ledger has the rows of all answers. Then it kills.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from nerite.storage.database import Database
from postgres_server import postgres_server
from routing import ADMIN_KEY, ROUTER, routing
from serving import ALL_TENANTS, HELD, NERITE, PATIENCE, Serving, eventually, let_go, python_model, serving

COUNT = 6
INFER = "/v2/models/held/infer"
# As many requests as there are items: who runs an item again is not charged again.
POLICY = f"""
[tenants.acme]
keys = ["a-key"]
requests_per_minute = {COUNT}
"""


def connected(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="a-key", max_retries=0)


def create(client: openai.OpenAI, count: int = COUNT) -> str:
    lines = [
        {
            "custom_id": f"item-{n}",
            "url": INFER,
            "body": {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [-1 - n]}]},
        }
        for n in range(count)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=INFER, completion_window="1h")  # type: ignore[call-overload]
    return str(made.id)


def answered_once(client: openai.OpenAI, batch: str, count: int = COUNT) -> None:
    """Wait for the end of a batch; assert that each item is in the output once."""
    eventually(lambda: client.batches.retrieve(batch).status == "completed")
    name = client.batches.retrieve(batch).output_file_id
    assert name is not None
    rows = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"item-{n}" for n in range(count)]
    assert [row["response"]["body"]["outputs"][0]["data"] for row in rows] == [[-1.0 - n] for n in range(count)]


@contextmanager
def uncommitted(database: Path) -> Iterator[None]:
    """Let nobody commit anything to a database of SQLite."""
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def endings(server: Serving) -> dict[str, int]:
    told = server.json("GET", "/v2/usage?group_by=ending")["data"]
    return {each["ending"]: each["requests"] for each in told}


def used(server: Serving) -> dict[str, Any]:
    """Return what the tenant has used, as it is told itself."""
    status, _, body = server.ask("GET", "/v1/usage", authorization="Bearer a-key")
    assert status == 200
    (found,) = json.loads(body)["data"]
    return dict(found)


def bill(*flags: str | Path) -> Any:
    done = subprocess.run(
        [NERITE, "bill", "--format", "json", *flags], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def executions(server: Serving) -> int:
    return server.text.count("executes -")


def kill_before_commit(batches: Serving, server: Serving, models: Path, folder: Path) -> None:
    """Kill the process that keeps the batches when all items are answered, and before it has written an answer."""
    with uncommitted(folder / "batches.db"):
        let_go(models / "held")
        eventually(lambda: endings(server).get("answered") == COUNT)
        os.kill(batches.process.pid, signal.SIGKILL)
        batches.process.wait()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    python_model(tmp_path / "models", "held", HELD)
    (tmp_path / "policy.toml").write_text(POLICY)
    return tmp_path / "models"


@pytest.mark.parametrize("fronts", [(), ("--front-processes=2",)])
def test_items_of_a_server_that_is_killed(models: Path, tmp_path: Path, fronts: tuple[str, ...]) -> None:
    ledger = tmp_path / "ledger.db"
    flags = [f"--batches={tmp_path / 'batches.db'}", f"--ledger={ledger}", f"--policy-file={tmp_path / 'policy.toml'}"]
    flags += [ALL_TENANTS, *fronts]
    with serving(models, tmp_path / "log", *flags, clean=False) as server, connected(server) as client:
        batch = create(client)
        eventually(lambda: executions(server) == 1)
        kill_before_commit(server, server, models, tmp_path)
    with serving(models, tmp_path / "log-2", *flags) as server, connected(server) as client:
        answered_once(client, batch)
        assert executions(server) == COUNT, "all have run again"
        assert endings(server) == {"answered": COUNT, "repeated": COUNT}
        assert used(server)["requests"] == COUNT
    (line,) = bill("--ledger", ledger)
    assert (line["tenant"], line["requests"]) == ("acme", COUNT)
    with closing(sqlite3.connect(ledger)) as database:
        (charged,) = database.execute(
            "SELECT SUM(compute_seconds) FROM ledger_rows WHERE tenant = 'acme' AND ending = 'answered'"
        ).fetchone()
    assert line["busy_seconds"] == pytest.approx(charged, abs=1e-6)
    assert bill("--ledger", ledger, "--check")[-1]["cut_short"] == 0


@contextmanager
def member(models: Path, folder: Path) -> Iterator[Serving]:
    """Run a server that believes routers, whose ledger and quotas outlive them."""
    (folder / "keys").write_text("a-secret\n")
    flags = f"--ledger={folder / 'server.db'}", f"--router-key-file={folder / 'keys'}"
    with serving(models, folder / "log", *flags, ALL_TENANTS, f"--policy-file={folder / 'policy.toml'}") as running:
        yield running


def cluster(folder: Path, running: Serving) -> tuple[str, str]:
    pool = f'[[pool]]\nname = "main"\nhealth-interval = "200ms"\nmembers = [{{ http = "{running.http}" }}]\n'
    settings = f"{ROUTER}member-key-file = '{folder / 'keys'}'\npolicy-file = '{folder / 'policy.toml'}'\n{ADMIN_KEY}"
    return pool, settings


def test_items_of_a_router_that_is_killed(models: Path, tmp_path: Path) -> None:
    with member(models, tmp_path) as running:
        pool, settings = cluster(tmp_path, running)
        settings += f"ledger = 'router.db'\nbatches = '{tmp_path / 'batches.db'}'\n"
        with routing(tmp_path, pool, router=settings, clean=False) as router, connected(router) as client:
            batch = create(client)
            eventually(lambda: executions(running) == 1)
            kill_before_commit(router, running, models, tmp_path)
        with routing(tmp_path, pool, router=settings) as router, connected(router) as client:
            answered_once(client, batch)
            assert executions(running) == 2 * COUNT, "all have run again"
            assert endings(running) == {"answered": COUNT, "repeated": COUNT}
            assert used(running)["requests"] == COUNT
    ledgers = "--ledger", tmp_path / "router.db", "--ledger", tmp_path / "server.db"
    (line,) = bill(*ledgers)
    assert (line["tenant"], line["requests"]) == ("acme", COUNT)
    assert bill("--ledger", tmp_path / "server.db", "--check")[-1]["cut_short"] == 0
    assert bill(*ledgers, "--reconcile")["differences"] == []


def test_items_under_way_when_their_router_is_killed(models: Path, tmp_path: Path) -> None:
    """The server stops what nobody waits for, and the tenant does not pay for that either."""
    with member(models, tmp_path) as running:
        pool, settings = cluster(tmp_path, running)
        settings += f"batches = '{tmp_path / 'batches.db'}'\n"
        with routing(tmp_path, pool, router=settings, clean=False) as router, connected(router) as client:
            batch = create(client, 1)
            eventually(lambda: executions(running) == 1)
            os.kill(router.process.pid, signal.SIGKILL)
            router.process.wait()
        let_go(models / "held")
        with routing(tmp_path, pool, router=settings) as router, connected(router) as client:
            answered_once(client, batch, 1)
        told = endings(running)
        assert told.pop("answered") == 1
        assert told.keys() <= {"preempted", "repeated", "refused"}, told
    (line,) = bill("--ledger", tmp_path / "server.db")
    assert (line["tenant"], line["requests"]) == ("acme", 1)


def test_items_of_a_router_that_slept_until_another_took_over(models: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with postgres_server(tmp_path / "postgres") as postgres, member(models, tmp_path) as running:
        pool, settings = cluster(tmp_path, running)
        settings += f"batches = '{postgres}'\nbatch-files = '{tmp_path / 'files'}'\nbatch-lease = '1s'\n"
        database = Database(postgres, [])
        with routing(tmp_path / "one", pool, router=settings) as one, connected(one) as here:
            batch = create(here, 1)
            eventually(lambda: executions(running) == 1)
            os.kill(one.process.pid, signal.SIGSTOP)
            asleep = database.call(lambda each: each.rows("SELECT owner FROM batches"))
            try:
                with routing(tmp_path / "other", pool, router=settings) as other, connected(other) as there:
                    eventually(lambda: database.call(lambda each: each.rows("SELECT owner FROM batches")) != asleep)
                    let_go(models / "held")
                    answered_once(there, batch, 1)
                    os.kill(one.process.pid, signal.SIGCONT)
                    eventually(lambda: executions(running) == 2)
                    assert endings(running) == {"answered": 1, "repeated": 1}
            finally:
                os.kill(one.process.pid, signal.SIGCONT)
                database.close()
    (line,) = bill("--ledger", tmp_path / "server.db")
    assert (line["tenant"], line["requests"]) == ("acme", 1)
