"""Several routers before the same members: one of them places models, by the demand of all.

A lease in Redis says which one. Each router tells its demand there once a second, and the one that has the lease gets
what the others have told. Without Redis each router places by its own demand: that does no harm beyond loads that
were not needed, because orders may be repeated and copies stay for a while.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Final, Protocol

import orjson

from nerite.core.errors import Unsupported
from nerite.redis.settings import RedisSettings

_LEASE_MS: Final = 10_000
"""For so long a router that is gone keeps the lease."""
_MOST_MODELS: Final = 1000
"""Models whose demand a router tells: those with the most."""
_MEANWHILE: Final = "each router places models by its own demand"
_SCRIPT: Final = b"""
local now = tonumber(redis.call('TIME')[1])
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  holder = ARGV[1]
end
redis.call('HSET', KEYS[2], ARGV[1], now .. ' ' .. ARGV[3])
redis.call('PEXPIRE', KEYS[2], 60000)
if holder ~= ARGV[1] then return '' end
local told = {'leads'}
local all = redis.call('HGETALL', KEYS[2])
for at = 1, #all, 2 do
  local since, demand = string.match(all[at + 1], '^(%d+) (.*)$')
  if now - tonumber(since) > tonumber(ARGV[2]) / 1000 then
    redis.call('HDEL', KEYS[2], all[at])
  elseif all[at] ~= ARGV[1] then
    told[#told + 1] = demand
  end
end
return table.concat(told, '\\n')
"""

_log = logging.getLogger("nerite.router")


class LeaseConnection(Protocol):
    """What a lease needs of a connection to Redis: it may be there or not."""

    def ask(self, command: Sequence[bytes], lease: PlacementLease) -> bool:
        """Send a command whose reply the lease takes; return False without a connection."""


class PlacementLease:
    """The lease of one router for the models of one pool. Times are in nanoseconds of a monotonic clock."""

    def __init__(self, pool: str, connection: LeaseConnection, name: str = "") -> None:
        """``name`` distinguishes the router; by default it is drawn at random."""
        self.name = name or secrets.token_hex(8)
        self.others: dict[str, float] = {}
        """Demand that other routers have told, by model."""
        self._pool = pool
        self._connection = connection
        self._has = False
        self._answered_ns = 0
        self._connected_ns = 0
        """Since when Redis was asked without an answer; 0: it is away, or has answered."""

    def exchange(self, demand: Mapping[str, float], now_ns: int) -> None:
        """Tell the demand of this router, and ask for the lease."""
        if not self._connection.ask(self.command(demand), self):
            self._connected_ns = self._answered_ns = 0
        elif not self._connected_ns:
            self._connected_ns = now_ns

    def command(self, demand: Mapping[str, float]) -> tuple[bytes, ...]:
        """Return the command that does so."""
        most = heapq.nlargest(_MOST_MODELS, demand.items(), key=lambda each: each[1])
        told = orjson.dumps({model: round(value, 4) for model, value in most})
        keys = (f"nerite:placement:{self._pool}:{what}".encode() for what in ("lease", "demand"))
        return b"EVAL", _SCRIPT, b"2", *keys, self.name.encode(), b"%d" % _LEASE_MS, told

    def take(self, reply: object, now_ns: int) -> None:
        """Take the reply of Redis; an error counts as none."""
        if not isinstance(reply, bytes):
            return
        self._answered_ns = now_ns
        first, *told = reply.split(b"\n")
        self._has = first == b"leads"
        self.others = {}
        for each in told:
            for model, value in _demand_of(each).items():
                self.others[model] = self.others.get(model, 0.0) + value

    def leads(self, now_ns: int) -> bool:
        """Whether this router is to place models: it has the lease, or Redis cannot say who has."""
        since_ns = max(self._answered_ns, self._connected_ns)
        if not since_ns or now_ns - since_ns > _LEASE_MS * 1_000_000:
            self.others = {}
            return True
        return self._has and self._answered_ns > 0


def _demand_of(text: bytes) -> dict[str, float]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {model: float(value) for model, value in found.items() if isinstance(value, int | float)}


class LeaseRedis:
    """The connection to Redis of all leases of a router."""

    def __init__(self, settings: RedisSettings) -> None:
        """Raises ``Unsupported`` if the client of Redis is not installed."""
        try:
            from nerite.redis.client import RedisClient
        except ModuleNotFoundError as error:
            if error.name != "hiredis":
                raise
            raise Unsupported(
                "router.redis needs the package 'hiredis'. Install it with: pip install 'nerite[redis]'"
            ) from None
        self._client = RedisClient(settings, asyncio.get_running_loop(), _log, _MEANWHILE)

    async def start(self) -> None:
        """Try to connect; go on trying in the background."""
        await self._client.open()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, command: Sequence[bytes], lease: PlacementLease) -> bool:
        """Send a command whose reply the lease takes; return False without a connection."""
        connection = self._client.connection
        if connection is None:
            return False
        connection.ask(command, lambda reply: lease.take(reply, monotonic_ns()))
        return True
