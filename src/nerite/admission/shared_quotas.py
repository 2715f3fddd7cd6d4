"""Quotas that all servers with the same Redis share.

Sends the exchanges of a ``LeaseBook`` and tells it whether Redis answers. No request waits for Redis as long as the
leases cover what its tenant uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from nerite.admission.lease_book import TICKS, LeaseBook
from nerite.admission.leases import Lease
from nerite.admission.policy import SharedQuotaSettings
from nerite.core.errors import Unsupported
from nerite.core.work_loop import WorkLoop
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.redis.settings import RedisSettings

PASSWORD: Final = "NERITE_REDIS_PASSWORD"
"""Environment variable with the password of Redis, if its address has none."""
_CONNECT_MS: Final = 1000
"""Timeout of a connection attempt: the server starts without Redis."""
_RETRY_SECONDS: Final = 2.0
"""Maximum number of seconds between two attempts to connect."""
_TICK_SECONDS: Final = 1 / TICKS
_FAREWELL_SECONDS: Final = 1.0
"""How long the end of a server waits until leases are given back."""
_MEANWHILE: Final = "tenants use what was leased, and then this server's share of their quotas"

_log = logging.getLogger("nerite.admission")


class SharedQuotas:
    """The leases of one server, and its connection to Redis. Used from the loop's thread only."""

    def __init__(self, settings: SharedQuotaSettings, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ``Unsupported`` if the client of Redis is not installed."""
        try:
            from nerite.redis.client import RedisClient
        except ModuleNotFoundError as error:
            if error.name != "hiredis":
                raise
            raise Unsupported(
                "shared quotas ([redis] in the policy) need the package 'hiredis'. Install it with: "
                "pip install 'nerite[redis]'"
            ) from None
        self.settings = settings
        self.book = LeaseBook(secrets.token_hex(8), self._wake, monotonic_ns(), _month(), settings.outage_share)
        self.on_answer: list[Callable[[], None]] = []
        """Called when requests that wait for quota must be offered again."""
        self.exchanges = 0
        """Number of exchanges with Redis."""
        self.failures = 0
        """Number of exchanges that failed."""
        self.loop = WorkLoop("quotas", waiting=lambda: 0 if self._timer is None else 1)
        """Its progress does not depend on Redis: while Redis is away, the server admits by its share."""
        self._loop = loop
        self._client = RedisClient(
            _connection_settings(settings.redis),
            loop,
            _log,
            _MEANWHILE,
            longest=_RETRY_SECONDS,
            changed=self._connection_changed,
            check=lambda: self.book.check(monotonic_ns()),
        )
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Try to connect, and keep the leases from now on, whether that succeeded or not."""
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        await self._client.open()

    def follow(self, settings: SharedQuotaSettings) -> None:
        """Apply the settings of a new policy, with the same Redis."""
        self.settings = settings
        self.book.follow(settings.outage_share)

    async def close(self) -> None:
        """Give all leases back if Redis answers soon, and close the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        command, connection = self.book.last_exchange(monotonic_ns()), self._client.connection
        if command is not None and connection is not None:
            answered = asyncio.Event()
            connection.ask(command, lambda _reply: answered.set())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await answered.wait()
        self._client.close()

    def write_metrics(self, page: Page) -> None:
        """Write the state of Redis and the leases."""
        page.write(REDIS, [REDIS.row(self)])
        page.write(LEASES, [LEASES.row(lease, lease.tenant, lease.limit) for lease in self.book.leases])

    def _wake(self) -> None:
        self._loop.call_soon(self._exchange)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        with self.loop.step("leases"):
            self.book.tick(monotonic_ns(), _month())
            self._exchange()

    def _exchange(self) -> None:
        connection = self._client.connection
        if connection is None:
            return
        command = self.book.exchange(monotonic_ns())
        if command is not None:
            self.exchanges += 1
            connection.ask(command, self._answered)

    def _answered(self, reply: bytes | int | list[int] | Exception | None) -> None:
        if isinstance(reply, OSError):  # the connection is lost, which its owner is told
            self.failures += 1
            return
        try:
            if not isinstance(reply, list):
                raise ValueError(str(reply))
            self.book.answered(reply, monotonic_ns())
        except ValueError as error:
            self.failures += 1
            self._client.drop(OSError(f"it refuses to share quotas: {error}"))
        except Exception as error:  # a new connection begins with an exchange of its own
            self.failures += 1
            self.loop.failed("the reply of Redis", error, tries=0)
            self._client.drop(OSError("its reply could not be taken"))
        else:
            self.loop.succeeded("the reply of Redis")
            self._offer_again()

    def _offer_again(self) -> None:
        for number, call in enumerate(self.on_answer, 1):
            with self.loop.step(f"queue {number} of requests that wait for quota"):
                call()

    def _connection_changed(self) -> None:
        if self._client.connection is not None:
            self.book.connected()
        else:
            self.book.lost(monotonic_ns())
            self._offer_again()


REDIS: Final = MetricTable[SharedQuotas]((
    Metric("nerite_admission_redis_up", "gauge",
           "1 while Redis shares quotas among servers, 0 while this server admits by its share",
           lambda quotas: int(not quotas.book.away)),
    Metric("nerite_admission_redis_servers", "gauge",
           "Servers that shared quotas when Redis was asked last", lambda quotas: quotas.book.servers),
    Metric("nerite_admission_redis_exchanges", "counter",
           "Exchanges with Redis, each of any number of leases", lambda quotas: quotas.exchanges),
    Metric("nerite_admission_redis_failures", "counter",
           "Exchanges with Redis that failed", lambda quotas: quotas.failures),
    Metric("nerite_admission_lease_waits", "counter",
           "Requests that waited for Redis, because the leases of their tenant did not cover them",
           lambda quotas: quotas.book.waits),
))  # fmt: skip

LEASES: Final = MetricTable[Lease]((
    Metric("nerite_admission_leased", "gauge",
           "Amount that this server has leased of a shared quota and not used; negative if it owes some",
           lambda lease: lease.held),
), labels=("tenant", "limit"))  # fmt: skip


def _connection_settings(redis: RedisSettings) -> RedisSettings:
    password = redis.password or os.environ.get(PASSWORD, "")
    return dataclasses.replace(redis, password=password, connect_timeout=_CONNECT_MS)


def _month() -> str:
    """Return the calendar month (UTC), of which monthly quotas are."""
    return time.strftime("%Y-%m", time.gmtime())
