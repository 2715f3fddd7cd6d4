"""Responses that outlive their request: the rows of each tenant, with the conversation that led to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.errors import NeriteError, NotFound
from nerite.storage.database import Database, Transaction

_log = logging.getLogger("nerite.http")
SECONDS: Final = 30 * 86400
"""How long a response is kept, as with OpenAI."""
_LARGEST: Final = 16 << 20
"""Maximum size in bytes of the conversation of a response that is kept."""
SEVERAL: Final = "Each server looks in its own database: several need a common one (docs/agents.md)."
"""What may be wrong if a response is not found."""


class ResponseSchema:
    """The table of responses."""

    name = "responses"
    migrations: Sequence[str] = (
        "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL, "
        "items BLOB NOT NULL, response BLOB NOT NULL)",
        "CREATE INDEX responses_by_expiry ON responses (expires_at)",
    )


class StoredResponse(NamedTuple):
    """A response, and the items of its conversation before it; both in JSON."""

    items: bytes
    response: bytes

    def conversation(self) -> bytes:
        """Return all items of the conversation, with those of the response."""
        return orjson.dumps([*orjson.loads(self.items), *orjson.loads(self.response)["output"]])


class ResponseStore:
    """All rows. Those of other tenants do not exist for a tenant."""

    def __init__(self, location: str) -> None:
        """Open the database. Blocking. Raises ``NeriteError``."""
        self._database = Database(location, [ResponseSchema()])

    async def close(self) -> None:
        """Close the database when everything is written."""
        await self._database.run(lambda _: None)
        self._database.close()

    async def save(self, tenant: str, items: bytes, response: Mapping[str, Any]) -> None:
        """Keep a response. What cannot be kept is logged: the client has its response already."""
        encoded = orjson.dumps(response)
        if len(items) + len(encoded) > _LARGEST:
            _log.warning("response '%s' is not kept: its conversation exceeds %d bytes", response["id"], _LARGEST)
            return
        now = time.time()

        def work(transaction: Transaction) -> None:
            transaction.execute("DELETE FROM responses WHERE expires_at <= ?", [now])
            transaction.execute(
                "INSERT INTO responses (id, tenant, expires_at, items, response) VALUES (?, ?, ?, ?, ?)",
                [response["id"], tenant, now + SECONDS, items, encoded],
            )

        try:
            await self._database.run(work)
        except NeriteError as error:
            _log.error("response '%s' could not be kept: %s", response["id"], error.message)

    async def find(self, tenant: str, name: str) -> StoredResponse:
        """Return a response. Raises ``NotFound``."""

        def work(transaction: Transaction) -> StoredResponse | None:
            row = transaction.row(
                "SELECT items, response FROM responses WHERE id = ? AND tenant = ? AND expires_at > ?",
                [name, tenant, time.time()],
            )
            return None if row is None else StoredResponse(bytes(row[0]), bytes(row[1]))

        found = await self._database.run(work)
        if found is None:
            raise NotFound(f"Response with id '{name}' not found. {SEVERAL}")
        return found

    async def remove(self, tenant: str, name: str) -> None:
        """Remove a response. Raises ``NotFound``."""

        def work(transaction: Transaction) -> int:
            return transaction.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", [name, tenant])

        if not await self._database.run(work):
            raise NotFound(f"Response with id '{name}' not found. {SEVERAL}")
