"""Stored responses of the Responses API: their endpoints, and the conversations that requests continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from nerite.core.errors import NeriteError, NotFound
from nerite.core.failures import report
from nerite.core.request import EVERYBODY, CancelReason, RequestHeader
from nerite.llm.openai.errors import ApiError, reply_of
from nerite.llm.openai.responses.store import SEVERAL, ResponseStore
from nerite.transports.access import SenderHeaders
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.reply import Reply, json_reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_NO_STORE: Final = "This server keeps no responses: start it with --responses=PATH (docs/agents.md)."


class ResponseApi:
    """Answers the endpoints of stored responses, and keeps new ones."""

    def __init__(self, store: ResponseStore | None) -> None:
        """``store`` is None if the server keeps no responses."""
        self._store = store
        self._calls = BackgroundCalls(reply_of)
        self._saves: set[asyncio.Task[None]] = set()

    @property
    def keeps(self) -> bool:
        """Whether responses are kept."""
        return self._store is not None

    def save(self, sender: SenderHeaders, items: bytes, response: Mapping[str, Any]) -> None:
        """Keep a response, if any are. It is there for every later request of its tenant."""
        if self._store is None:
            return
        task = asyncio.get_running_loop().create_task(self._store.save(_tenant(sender), items, response))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    def find(self, connection: HttpExchange, sender: SenderHeaders, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then`` with the conversation up to a response. Raises ``ApiError`` if none are kept."""
        if self._store is None:
            raise ApiError(_NO_STORE, "previous_response_id", "previous_response_not_found")
        ConversationLookup(connection, self._conversation(self._store, sender, name), then)

    @staticmethod
    async def _conversation(store: ResponseStore, sender: SenderHeaders, name: str) -> bytes:
        try:
            found = await store.find(_tenant(sender), name)
        except NotFound:
            raise ApiError(
                f"Previous response with id '{name}' not found. {SEVERAL}",
                "previous_response_id",
                "previous_response_not_found",
            ) from None
        return await asyncio.to_thread(found.conversation)

    def answer(
        self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, response: str, *, items: bool
    ) -> None:
        """Return or delete a response, or return the ``items`` of its conversation before it."""
        store, tenant = self._store, _tenant(sender)
        if store is None:
            raise ApiError(_NO_STORE, None, "responses_not_enabled", 404)
        if connection.head.method == "DELETE":
            work = self._remove(store, tenant, response)
        else:
            work = self._found(store, tenant, response, items=items)
        self._calls.start(connection, work)

    @staticmethod
    async def _remove(store: ResponseStore, tenant: str, name: str) -> Reply:
        await store.remove(tenant, name)
        return json_reply({"id": name, "object": "response.deleted", "deleted": True})

    @staticmethod
    async def _found(store: ResponseStore, tenant: str, name: str, *, items: bool) -> Reply:
        found = await store.find(tenant, name)
        if not items:
            return Reply(200, found.response)
        listed = orjson.loads(found.items)
        for number, item in enumerate(listed):
            item.setdefault("id", f"item_{number}")
        ids = [item["id"] for item in listed] or [None]
        return json_reply({"object": "list", "data": listed, "first_id": ids[0], "last_id": ids[-1], "has_more": False})


class ConversationLookup:
    """A look into the database that precedes the request to the model. Its connection treats it as the running work."""

    id = ""

    def __init__(
        self, connection: HttpExchange, work: Coroutine[Any, Any, bytes], then: Callable[[bytes], None]
    ) -> None:
        """``then`` is called with the result of ``work`` and may raise ``NeriteError``."""
        self.header = RequestHeader("", "", ())
        self._connection = connection
        self._then = then
        connection.request = self
        self._task = asyncio.get_running_loop().create_task(self._run(work))

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Stop, because the client is gone."""
        self._task.cancel()

    def pause(self, paused: bool) -> None:
        """Do nothing: no reply is being sent yet."""

    async def _run(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            self._then(await work)
        except NeriteError as error:
            self._connection.send([reply_of(error).encode()])
        except Exception as error:
            self._connection.send([reply_of(report("openai", error, "in a stored conversation")).encode()])


def _tenant(sender: SenderHeaders) -> str:
    return EVERYBODY if sender.caller is None else sender.caller.tenant
