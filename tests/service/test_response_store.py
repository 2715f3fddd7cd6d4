"""Responses that are kept: each item once, as long as anybody needs it, and not more of them than allowed."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nerite.core.errors import Exhausted, NotFound, QuotaExceeded
from nerite.llm.openai.responses.store import (
    SECONDS,
    ResponseShare,
    ResponseStore,
    ResponseUse,
    conversation,
    items_before,
)
from nerite.storage.database import Database

PLENTY = ResponseUse(1000, 1 << 20)
Work = Callable[[ResponseStore], Coroutine[Any, Any, None]]


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "responses.db")
    where = str(request.getfixturevalue("postgres"))
    database = Database(where, [])
    with database.transaction() as transaction:
        for table in ("responses", "response_uses", "schema_versions"):
            transaction.execute(f"DROP TABLE IF EXISTS {table}")
    database.close()
    return where


def stored(location: str, work: Work, most: ResponseUse = PLENTY, share: ResponseShare | None = None) -> None:
    async def run() -> None:
        store = ResponseStore(location, most, lambda _: share)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


def items(*texts: str) -> bytes:
    return json.dumps(list(texts)).encode()


async def keep(store: ResponseStore, name: str, previous: str = "", tenant: str = "acme", text: str = "") -> None:
    await store.save(tenant, previous, items(text or f"asked {name}"), {"id": name, "output": [f"said {name}"]})


async def found(store: ResponseStore, name: str, tenant: str = "acme") -> list[str]:
    whole: list[str] = json.loads(conversation(await store.turns(tenant, name)))
    return whole


def count(location: str, query: str) -> int:
    database = Database(location, [])
    row = database.call(lambda transaction: transaction.row(query))
    database.close()
    return int(row[0] or 0) if row else 0


def test_a_conversation_is_stored_once(location: str) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(100):
            await keep(store, f"r{number}", f"r{number - 1}" if number else "", text="x" * 700)
        assert await found(store, "r99") == [part for n in range(100) for part in ("x" * 700, f"said r{n}")]
        assert items_before(await store.turns("acme", "r1")) == ["x" * 700, "said r0", "x" * 700]
        assert json.loads(await store.find("acme", "r7")) == {"id": "r7", "output": ["said r7"]}
        with pytest.raises(NotFound):
            await store.turns("bob", "r99")

    stored(location, work)
    assert count(location, "SELECT SUM(LENGTH(items) + LENGTH(response)) FROM responses") < 100 * 800
    sizes = "SELECT SUM(LENGTH(items) + LENGTH(response)) FROM responses"
    assert count(location, "SELECT bytes FROM response_uses WHERE tenant = 'acme'") == count(location, sizes)


def test_what_is_deleted_is_gone_when_nobody_continues_it(location: str) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "a")
        await keep(store, "b", "a")
        await keep(store, "c", "b")
        await keep(store, "d", "b")
        for name in ("b", "a"):
            await store.remove("acme", name)
            with pytest.raises(NotFound):
                await store.find("acme", name)
            with pytest.raises(NotFound):
                await store.remove("acme", name)
        whole = ["asked a", "said a", "asked b", "said b"]
        assert await found(store, "c") == [*whole, "asked c", "said c"]
        await store.remove("acme", "c")
        assert await found(store, "d") == [*whole, "asked d", "said d"]
        assert count(location, "SELECT COUNT(*) FROM responses") == 3
        await store.remove("acme", "d")
        assert count(location, "SELECT COUNT(*) FROM responses") == 0
        assert count(location, "SELECT SUM(bytes) + SUM(responses) FROM response_uses") == 0
        await keep(store, "e", "a")
        with pytest.raises(NotFound):
            await store.find("acme", "e")

    stored(location, work)


def test_what_has_expired_stays_as_long_as_it_is_continued(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ResponseStore) -> None:
        now = 1_000_000.0
        monkeypatch.setattr("time.time", lambda: now)
        await keep(store, "a")
        now += SECONDS / 2
        await keep(store, "b", "a")
        now += SECONDS / 2 + 1
        await keep(store, "other")
        with pytest.raises(NotFound):
            await store.find("acme", "a")
        assert await found(store, "b") == ["asked a", "said a", "asked b", "said b"]
        now += SECONDS / 2
        await keep(store, "another")
        assert count(location, "SELECT COUNT(*) FROM responses") == 2

    stored(location, work)


def test_a_tenant_may_have_as_much_as_is_left(location: str) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(8):
            await keep(store, f"a{number}")
        assert store.may_be_full("acme") and not store.may_be_full("bob")
        with pytest.raises(QuotaExceeded, match=r"tenant 'acme' stores 5 responses, and may store 5, as many as are"):
            await store.check_room("acme", 1)
        for number in range(8):
            await keep(store, f"b{number}", tenant="bob")
        assert count(location, "SELECT COUNT(*) FROM responses WHERE tenant = 'bob'") == 3, "as many as are left"
        await store.remove("acme", "a0")
        assert not store.may_be_full("acme")

    stored(location, work, ResponseUse(10, 1 << 20), ResponseShare())


def test_a_tenant_may_have_what_the_policy_says(location: str) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(3):
            await keep(store, f"a{number}", text="x" * 100)
        assert count(location, "SELECT COUNT(*) FROM responses") == 2
        with pytest.raises(QuotaExceeded, match="may store 300, by the policy: delete responses, or"):
            await store.check_room("acme", 100)

    stored(location, work, share=ResponseShare(size=300))


def test_all_together_have_a_maximum(location: str) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(4):
            await keep(store, f"a{number}")
        assert store.may_be_full("acme")
        with pytest.raises(Exhausted, match="all 3 responses that this server keeps are there"):
            await store.check_room("acme", 1)

    async def again(store: ResponseStore) -> None:
        assert store.may_be_full("acme"), "also after a restart"

    stored(location, work, ResponseUse(3, 1 << 20))
    stored(location, again, ResponseUse(3, 1 << 20))


def test_responses_of_an_earlier_release(tmp_path: Path) -> None:
    """They have their whole conversation."""
    path = tmp_path / "responses.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE schema_versions (name TEXT PRIMARY KEY, version BIGINT NOT NULL)")
        database.execute("INSERT INTO schema_versions VALUES ('responses', 2)")
        database.execute(
            "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL, "
            "items BLOB NOT NULL, response BLOB NOT NULL)"
        )
        database.execute("CREATE INDEX responses_by_expiry ON responses (expires_at)")
        row = ("old", "acme", 9e9, items("1", "2", "3"), b'{"id":"old","output":["4"]}')
        database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)

    async def work(store: ResponseStore) -> None:
        await keep(store, "new", "old")
        assert await found(store, "new") == ["1", "2", "3", "4", "asked new", "said new"]

    stored(str(path), work)
    assert count(str(path), "SELECT responses FROM response_uses") == 2
