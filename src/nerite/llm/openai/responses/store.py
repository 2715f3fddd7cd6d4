"""Responses that outlive their request: the rows of each tenant, each with what its turn adds to a conversation.

A turn names the one that it continues, so that no item is stored twice. A response that was deleted or has expired
exists for nobody, but its turn stays as long as a later one continues it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.errors import Exhausted, NeriteError, NotFound, QuotaExceeded
from nerite.storage.database import Database, Transaction

_log = logging.getLogger("nerite.http")
SECONDS: Final = 30 * 86400
"""How long a response is kept, as with OpenAI."""
_LARGEST: Final = 16 << 20
"""Maximum size in bytes of the conversation of a response that is kept."""
_REMOVED_AT_ONCE: Final = 100
"""Responses that have expired and are removed when another one is kept."""
SEVERAL: Final = "Each server looks in its own database: several need a common one (docs/agents.md)."
"""What may be wrong if a response is not found."""
_SHOWN: Final = "id = ? AND tenant = ? AND hidden = 0 AND expires_at > ?"


class ResponseSchema:
    """The tables of responses."""

    name = "responses"
    migrations: Sequence[str] = (
        "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL, "
        "items BLOB NOT NULL, response BLOB NOT NULL)",
        "CREATE INDEX responses_by_expiry ON responses (expires_at)",
        "ALTER TABLE responses ADD COLUMN previous TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE responses ADD COLUMN size BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE responses ADD COLUMN conversation_size BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE responses ADD COLUMN hidden BIGINT NOT NULL DEFAULT 0",
        "UPDATE responses SET size = LENGTH(items) + LENGTH(response)",
        "UPDATE responses SET conversation_size = size",
        "CREATE INDEX responses_by_previous ON responses (previous) WHERE previous <> ''",
        "DROP INDEX responses_by_expiry",
        "CREATE INDEX responses_shown_by_expiry ON responses (expires_at) WHERE hidden = 0",
        "CREATE TABLE response_uses (tenant TEXT PRIMARY KEY, responses BIGINT NOT NULL, bytes BIGINT NOT NULL)",
        "INSERT INTO response_uses SELECT tenant, COUNT(*), SUM(size) FROM responses GROUP BY tenant",
    )


class StoredTurn(NamedTuple):
    """What a response adds to its conversation: the items of its request, and the response; both in JSON."""

    items: bytes
    response: bytes

    @property
    def output(self) -> list[Any]:
        """The items of the response."""
        output: list[Any] = orjson.loads(self.response)["output"]
        return output


def items_before(turns: Sequence[StoredTurn]) -> list[Any]:
    """Return all items of a conversation, without those of its last response."""
    *earlier, last = turns
    items = [item for turn in earlier for item in (*orjson.loads(turn.items), *turn.output)]
    return [*items, *orjson.loads(last.items)]


def conversation(turns: Sequence[StoredTurn]) -> bytes:
    """Return all items of a conversation, with those of its last response."""
    return orjson.dumps([*items_before(turns), *turns[-1].output])


class ResponseUse(NamedTuple):
    """Responses that are stored, and their bytes; or the most that there may be."""

    responses: int
    size: int


class ResponseShare(NamedTuple):
    """What a tenant may store. None: as much as is left for the others, which alone is half of all."""

    responses: int | None = None
    size: int | None = None


class ResponseStore:
    """All rows. Those of other tenants do not exist for a tenant."""

    def __init__(
        self, location: str, most: ResponseUse, share_of: Callable[[str], ResponseShare | None] = lambda _: None
    ) -> None:
        """Open the database. Blocking. Raises ``NeriteError``.

        ``most`` may be stored of all tenants. ``share_of`` returns what a tenant may store; None for all of it.
        """
        self._most = most
        self._share_of = share_of
        self._database = Database(location, [ResponseSchema()])
        self._full = self._database.call(lambda transaction: {*self._without_room(transaction)})
        """Tenants for whom there was no room."""

    async def close(self) -> None:
        """Close the database when everything is written."""
        await self._database.run(lambda _: None)
        self._database.close()

    def may_be_full(self, tenant: str) -> bool:
        """Whether there was no room for a tenant when that was last asked, so that ``check_room`` is to be called."""
        return tenant in self._full

    async def check_room(self, tenant: str, size: int) -> None:
        """Remove what has expired. Raises ``QuotaExceeded`` or ``Exhausted`` if a response cannot be kept."""

        def work(transaction: Transaction) -> None:
            _remove_expired(transaction, time.time())

        await self._database.run(work)
        await self._database.run(lambda transaction: self._check_room(transaction, tenant, size))
        self._full.discard(tenant)

    async def save(self, tenant: str, previous: str, items: bytes, response: Mapping[str, Any]) -> None:
        """Keep a response, which continues the one with the id ``previous`` unless that is empty.

        What cannot be kept is logged: the client has its response already.
        """
        encoded = orjson.dumps(response)
        now, size = time.time(), len(items) + len(encoded)

        def work(transaction: Transaction) -> str:
            _remove_expired(transaction, now)
            before = transaction.row("SELECT conversation_size FROM responses WHERE id = ?", [previous])
            if previous and before is None:
                return "what it continues was deleted meanwhile"
            whole = size + (int(before[0]) if before else 0)
            if whole > _LARGEST:
                return f"its conversation exceeds {_LARGEST} bytes"
            self._check_room(transaction, tenant, size)
            transaction.execute(
                "INSERT INTO responses (id, tenant, expires_at, items, response, previous, size, conversation_size) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [response["id"], tenant, now + SECONDS, items, encoded, previous, size, whole],
            )
            _count(transaction, tenant, 1, size)
            return ""

        try:
            if problem := await self._database.run(work):
                _log.warning("response '%s' is not kept: %s", response["id"], problem)
        except (Exhausted, QuotaExceeded) as error:
            self._full.add(tenant)
            _log.warning("response '%s' is not kept: %s", response["id"], error.message)
        except NeriteError as error:
            _log.error("response '%s' could not be kept: %s", response["id"], error.message)

    def _check_room(self, transaction: Transaction, tenant: str, size: int) -> None:
        """Raise ``QuotaExceeded`` if a tenant may not store another response, or ``Exhausted`` if nobody may."""
        found = transaction.row("SELECT SUM(responses), SUM(bytes) FROM response_uses")
        used = ResponseUse(*(int(each or 0) for each in found or (0, 0)))
        found = transaction.row("SELECT responses, bytes FROM response_uses WHERE tenant = ?", [tenant])
        own = ResponseUse(*map(int, found or (0, 0)))
        share = self._share_of(tenant)
        remedy = "delete responses, or send store: false"
        for what, wanted, all_of_it, taken, its, limit in zip(
            ("responses", "bytes of responses"),
            (1, size),
            self._most,
            used,
            own,
            (None, None) if share is None else share,
            strict=True,
        ):
            if taken + wanted > all_of_it:
                raise Exhausted(f"all {all_of_it} {what} that this server keeps are there: {remedy}")
            if share is None:
                continue
            most = all_of_it - taken if limit is None else limit
            if its + wanted > most:
                why = "as many as are left for others" if limit is None else "by the policy"
                raise QuotaExceeded(f"tenant '{tenant}' stores {its} {what}, and may store {most}, {why}: {remedy}")

    def _without_room(self, transaction: Transaction) -> Iterator[str]:
        """Return the tenants who may store no further response."""
        for (tenant,) in transaction.rows("SELECT tenant FROM response_uses"):
            try:
                self._check_room(transaction, tenant, 1)
            except (Exhausted, QuotaExceeded):
                yield tenant

    async def find(self, tenant: str, name: str) -> bytes:
        """Return a response in JSON. Raises ``NotFound``."""
        found = await self._database.run(
            lambda transaction: transaction.row(
                f"SELECT response FROM responses WHERE {_SHOWN}", [name, tenant, time.time()]
            )
        )
        if found is None:
            raise NotFound(f"Response with id '{name}' not found. {SEVERAL}")
        return bytes(found[0])

    async def turns(self, tenant: str, name: str) -> list[StoredTurn]:
        """Return the turns of the conversation that led to a response, which is the last. Raises ``NotFound``."""
        found = await self._database.run(
            lambda transaction: transaction.rows(
                "WITH RECURSIVE turns (id, previous, age) AS ("
                f"SELECT id, previous, 0 FROM responses WHERE {_SHOWN} "
                "UNION ALL SELECT earlier.id, earlier.previous, turns.age + 1 FROM responses AS earlier "
                "JOIN turns ON earlier.id = turns.previous) "
                "SELECT responses.items, responses.response FROM turns JOIN responses ON responses.id = turns.id "
                "ORDER BY turns.age DESC",
                [name, tenant, time.time()],
            )
        )
        if not found:
            raise NotFound(f"Response with id '{name}' not found. {SEVERAL}")
        return [StoredTurn(bytes(items), bytes(response)) for items, response in found]

    async def remove(self, tenant: str, name: str) -> None:
        """Remove a response. Raises ``NotFound``."""

        def work(transaction: Transaction) -> bool:
            found = transaction.row(f"SELECT id FROM responses WHERE {_SHOWN}", [name, tenant, time.time()])
            if found is not None:
                _hide(transaction, name)
            return found is not None

        if not await self._database.run(work):
            raise NotFound(f"Response with id '{name}' not found. {SEVERAL}")
        self._full.discard(tenant)


def _remove_expired(transaction: Transaction, now: float) -> None:
    """Remove some of the responses that have expired."""
    statement = f"SELECT id FROM responses WHERE hidden = 0 AND expires_at <= ? LIMIT {_REMOVED_AT_ONCE}"
    for (name,) in transaction.rows(statement, [now]):
        _hide(transaction, name)


def _hide(transaction: Transaction, name: str) -> None:
    """Remove a response, and those before it that nobody can see; it stays without being seen if it is continued."""
    transaction.execute("UPDATE responses SET hidden = 1 WHERE id = ?", [name])
    while name:
        found = transaction.row("SELECT tenant, previous, size FROM responses WHERE id = ? AND hidden = 1", [name])
        if found is None or transaction.row("SELECT 1 FROM responses WHERE previous = ?", [name]) is not None:
            return
        tenant, previous, size = found
        transaction.execute("DELETE FROM responses WHERE id = ?", [name])
        _count(transaction, tenant, -1, -int(size))
        name = previous


def _count(transaction: Transaction, tenant: str, responses: int, size: int) -> None:
    """Add to what a tenant stores."""
    transaction.execute(
        "INSERT INTO response_uses (tenant, responses, bytes) VALUES (?, ?, ?) ON CONFLICT (tenant) DO UPDATE SET "
        "responses = response_uses.responses + excluded.responses, bytes = response_uses.bytes + excluded.bytes",
        [tenant, responses, size],
    )
