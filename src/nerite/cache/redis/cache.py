"""The cache in Redis. It may be slow, full, away, or anybody's: then the model computes, and the log says why."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Final

from nerite.cache.complaint import Complaint
from nerite.cache.interface import Found
from nerite.cache.redis import settings as redis_settings
from nerite.cache.redis.connection import RedisConnection, Reply
from nerite.cache.redis.entry import BadEntry, EntryForm
from nerite.cache.redis.settings import RedisSettings
from nerite.core.errors import Internal
from nerite.core.response import InferenceResponse
from nerite.observability.exposition import UNLABELLED, Family
from nerite.scheduling.backoff import Backoff

LARGEST: Final = 512 * 1024 * 1024
"""Bytes that Redis keeps under one key."""

_log = logging.getLogger("nerite.cache")


async def open_redis(given: Mapping[str, str], environment: Mapping[str, str]) -> RedisCache:
    """Return a cache that is connected. Raises ``NeriteError``."""
    settings = redis_settings.read(given, environment)
    cache = RedisCache(settings, asyncio.get_running_loop())
    try:
        await cache.connect()
    except OSError as error:
        raise Internal(f"Failed to initialize RedisCache: {_said(error, settings)}") from error
    return cache


class RedisCache:
    """Responses under keys that begin with ``nerite:``. How many there may be, and which go first, is Redis' affair."""

    shared = True

    def __init__(self, settings: RedisSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._patience = settings.socket_timeout / 1000
        self._connection: RedisConnection | None = None
        self._backoff = Backoff()
        self._form = EntryForm()
        self._away = Complaint()
        self._refused = Complaint()
        self._strange = Complaint()
        self._failures = 0
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self) -> None:
        """Connect, and say who we are. Raises ``OSError``."""
        settings = self._settings
        tls = settings.tls()
        async with asyncio.timeout(settings.connect_timeout / 1000 or None):
            _, connection = await self._loop.create_connection(
                lambda: RedisConnection(self._loop, self._patience, self._lost),
                settings.host,
                settings.port,
                ssl=tls,
                server_hostname=(settings.sni or settings.host) if tls is not None else None,
            )
            try:
                if settings.password:
                    await self._told(connection, b"AUTH", settings.user.encode(), settings.password.encode())
                if settings.db:
                    await self._told(connection, b"SELECT", b"%d" % settings.db)
                await self._told(connection, b"PING")
            except BaseException:  # whatever it was: a connection of no use must not stay
                connection.close(ConnectionError())
                raise
        self._connection = connection

    async def _told(self, connection: RedisConnection, *command: bytes) -> None:
        answered: asyncio.Future[Reply] = self._loop.create_future()

        def take(reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply)

        connection.ask(command, take)
        reply = await answered
        if isinstance(reply, OSError):
            raise reply
        if isinstance(reply, Exception):
            raise OSError(str(reply)) from reply

    def lookup(self, key: bytes, found: Found) -> None:
        """Look for a response; ``found`` is called when Redis has answered, or should have."""
        connection = self._usable()
        if connection is None:
            found(None)
        else:
            connection.ask((b"GET", _name(key)), lambda reply: found(self._read(key, reply)))

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Keep a response, if Redis takes it."""
        if sum(map(len, response.data)) > LARGEST - 1024 * 1024:
            self._failed(self._refused, f"Failed to insert key [{key.hex()}] into response cache: it is too large")
            return
        connection = self._usable()
        if connection is not None:
            connection.ask((b"SET", _name(key), self._form.write(key, response)), self._kept)

    def families(self) -> list[Family]:
        """Return how often Redis was of no use."""
        text = "Lookups and insertions that Redis did not answer, or not as it should"
        return [Family("nerite_cache_failures", text, "counter", [(UNLABELLED, self._failures)])]

    def close(self) -> None:
        """Leave Redis."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close(ConnectionError())

    def _usable(self) -> RedisConnection | None:
        connection = self._connection
        if connection is None or connection.full:
            self._failures += 1
            return None
        return connection

    def _read(self, key: bytes, reply: Reply) -> InferenceResponse | None:
        if reply is None:
            return None
        if isinstance(reply, bytes):
            try:
                return self._form.read(key, reply)
            except BadEntry as error:
                self._failed(self._strange, f"what Redis has under '{_name(key).decode()}' is not used: {error}")
        else:
            self._kept(reply)
        return None

    def _kept(self, reply: Reply) -> None:
        """Look whether Redis has done what it was asked to. That a connection was lost is said once for all."""
        if isinstance(reply, OSError):
            self._failures += 1
        elif isinstance(reply, Exception):
            self._failed(self._refused, f"Redis ({self._settings.place}) refuses: {reply}")

    def _failed(self, complaint: Complaint, text: str) -> None:
        self._failures += 1
        complaint.say(text)

    def _lost(self, connection: RedisConnection, reason: Exception) -> None:
        if connection is self._connection and not self._closed:
            self._connection = None
            self._away.say(f"lost Redis ({self._settings.place}), so that models compute everything: {reason}")
            self._try_again()

    def _try_again(self) -> None:
        wait = self._backoff.failed(self._loop.time())
        self._attempt = self._loop.create_task(self._reconnect(wait))

    async def _reconnect(self, wait: float) -> None:
        await asyncio.sleep(wait)
        try:
            await self.connect()
        except OSError as error:
            self._away.say(_said(error, self._settings))
            self._try_again()
        else:
            _log.info("connected to Redis (%s) again", self._settings.place)


def _name(key: bytes) -> bytes:
    return b"nerite:" + key.hex().encode()


def _said(error: OSError, settings: RedisSettings) -> str:
    """Return why there is no connection, in the words of Triton's client."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        why = os.strerror(error.errno)
    elif isinstance(error, TimeoutError) and not str(error):
        why = f"no connection in {settings.connect_timeout} ms"
    else:
        why = str(error)
    return f"Failed to connect to Redis ({settings.place}): {why}"
