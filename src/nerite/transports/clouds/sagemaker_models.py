"""The models that SageMaker loads and unloads while the server runs: each a repository of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nerite.core.client_text import checked
from nerite.core.errors import AlreadyExists, InvalidArgument, NeriteError
from nerite.repository import archive
from nerite.repository.registered import RegisteredRepository
from nerite.transports.clouds.dialects import status_of
from nerite.transports.http import reply
from nerite.transports.http.errands import Errands
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.json_text import parse_settings
from nerite.transports.http.reply import Reply
from nerite.transports.http.target import Call

if TYPE_CHECKING:
    from nerite.server import InferenceServer

NOT_FOUND: Final = Reply(404, b"", reply.PLAIN)


class Loaded(NamedTuple):
    """A model that SageMaker has loaded."""

    repository: RegisteredRepository
    model: str
    """Its name in the server: that of the archive if SageMaker told it, else SageMaker's own."""


class SagemakerModels:
    """Knows the models by SageMaker's names, which are hashes, and answers for them."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._models: dict[str, Loaded] = {}
        self._errands = Errands(_refusal)

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def tell_all(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """List the models that can be invoked."""
        listed = [_told(name, loaded) for name, loaded in self._models.items() if self._runs(loaded)]
        connection.send([reply.json_reply({"models": listed})._replace(content_type=reply.PLAIN).encode()])

    def _runs(self, loaded: Loaded) -> bool:
        try:
            self._server.find(loaded.model, "", "")
        except NeriteError:
            return False
        return True

    def tell(self, name: str) -> Call:
        """Return what describes a model."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            loaded = self._models.get(name)
            told = NOT_FOUND if loaded is None else reply.json_reply(_told(name, loaded))
            connection.send([told._replace(content_type=reply.PLAIN).encode()])

        return answer

    def load(self, target_model: str | None) -> Call:
        """Return what loads the model that a body names. ``target_model`` is what the caller of SageMaker calls it."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            self._errands.start(connection, self._load(body, target_model))

        return answer

    async def _load(self, body: memoryview, target_model: str | None) -> Reply:
        document = parse_settings(body) if body else {}
        name, url = _text(document, "model_name"), _text(document, "url")
        model = target_model or name
        place = await asyncio.to_thread(archive.find, url)
        names = {place.directory: model} if place.directory else {}
        repository = RegisteredRepository(str(place.repository), names)
        await self._server.add_repository(repository, model)
        self._models[name] = Loaded(repository, model)
        return reply.EMPTY

    def unload(self, name: str) -> Call:
        """Return what unloads a model, and answers when its memory is free."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            loaded = self._models.pop(name, None)
            if loaded is None:
                connection.send([NOT_FOUND.encode()])
            else:
                self._errands.start(connection, self._unload(loaded))

        return answer

    async def _unload(self, loaded: Loaded) -> Reply:
        await self._server.remove_repository(loaded.repository)
        return reply.EMPTY


def _told(name: str, loaded: Loaded) -> dict[str, str]:
    return {"modelName": name, "modelUrl": loaded.repository.location}


def _refusal(error: NeriteError) -> Reply:
    status = 409 if isinstance(error, AlreadyExists) else status_of(error)
    return reply.error_reply(error, reply.PLAIN)._replace(status=status)


def _text(document: Any, key: str) -> str:
    value = document.get(key, "") if isinstance(document, dict) else ""
    if not isinstance(value, str):
        raise InvalidArgument(f"attempt to access JSON non-string as string\n    Write '{key}' as text.")
    return checked(value, f"'{key}'")
