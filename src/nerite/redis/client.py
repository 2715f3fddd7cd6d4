"""A client of Redis that connects again after it has lost the connection. For the loop's thread only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

from nerite.core.failures import report
from nerite.observability.log import RateLimitedWarning
from nerite.redis.connection import MAX_REPLY, RedisConnection, Reply
from nerite.redis.settings import RedisSettings
from nerite.scheduling.backoff import ExponentialBackoff

_LONGEST: Final = 30.0
"""Maximum number of seconds between two attempts to connect."""


class RedisClient:
    """Keeps one connection to Redis, and opens it again with exponential backoff. The log says when it is lost."""

    def __init__(
        self,
        settings: RedisSettings,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        meanwhile: str,
        *,
        longest: float = _LONGEST,
        changed: Callable[[], None] = lambda: None,
        check: Callable[[], Sequence[bytes]] = lambda: (b"PING",),
        max_reply: int = MAX_REPLY,
    ) -> None:
        """``meanwhile`` says in the log what happens without Redis. ``changed``: called on connection and loss.

        ``longest``: maximum number of seconds between two attempts to connect. ``check`` returns the command that
        Redis must carry out, else it is taken to be away. ``max_reply`` is that of the connection.
        """
        self._max_reply = max_reply
        self.settings = settings
        self.connection: RedisConnection | None = None
        """The connection; None while there is none."""
        self._loop = loop
        self._log = log
        self._meanwhile = meanwhile
        self._changed = changed
        self._check = check
        self._backoff = ExponentialBackoff(limit=longest)
        self._unreachable = RateLimitedWarning(log)
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self) -> None:
        """Connect and authenticate. Raises ``OSError``."""
        settings = self.settings
        tls = settings.tls()
        async with asyncio.timeout(settings.connect_timeout / 1000 or None):
            _, connection = await self._loop.create_connection(
                lambda: RedisConnection(self._loop, settings.socket_timeout / 1000, self._lost, self._max_reply),
                settings.host,
                settings.port,
                ssl=tls,
                server_hostname=(settings.sni or settings.host) if tls is not None else None,
            )
            try:
                if settings.password:
                    await self._execute(connection, b"AUTH", settings.user.encode(), settings.password.encode())
                if settings.db:
                    await self._execute(connection, b"SELECT", b"%d" % settings.db)
                await self._execute(connection, *self._check())
            except BaseException:  # cancellation included: an unusable connection must not leak
                connection.close(ConnectionError())
                raise
        self.connection = connection
        self._changed()

    async def open(self) -> None:
        """Try to connect; if that fails, say so and go on trying in the background."""
        await self._connect_after(0.0)

    def drop(self, reason: Exception) -> None:
        """Close a connection that is of no use, and connect again later."""
        if self.connection is not None:
            self.connection.close(reason)

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self.connection is not None:
            self.connection.close(ConnectionError())

    def connect_error(self, error: OSError) -> str:
        """Return the text of a connection error, as Triton's client words it."""
        if isinstance(error, ConnectionError) and error.errno is not None:
            why = os.strerror(error.errno)
        elif isinstance(error, TimeoutError) and not str(error):
            why = f"no connection in {self.settings.connect_timeout} ms"
        else:
            why = str(error)
        return f"Failed to connect to Redis ({self.settings.place}): {why}"

    async def _execute(self, connection: RedisConnection, *command: bytes) -> None:
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

    def _lost(self, connection: RedisConnection, reason: Exception) -> None:
        if connection is self.connection and not self._closed:
            self.connection = None
            self._unreachable.say(f"lost the connection to Redis ({self.settings.place}); {self._meanwhile}: {reason}")
            self._changed()
            self._connect_later()

    def _connect_later(self) -> None:
        wait = self._backoff.failed(self._loop.time())
        self._attempt = self._loop.create_task(self._connect_after(wait))

    async def _connect_after(self, wait: float) -> None:
        await asyncio.sleep(wait)
        try:
            await self.connect()
        except OSError as error:
            self._unreachable.say(f"{self.connect_error(error)}; {self._meanwhile}")
            self._connect_later()
        except Exception as error:
            failure = report("loop", error, f"while a connection to Redis ({self.settings.place}) was opened")
            self._unreachable.say(f"Failed to connect to Redis: {failure.message}; {self._meanwhile}")
            if self.connection is None:
                self._connect_later()
        else:
            self._log.info(
                "%s to Redis (%s)", "reconnected" if self._unreachable.count else "connected", self.settings.place
            )
