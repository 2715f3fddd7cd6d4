"""The exchange of leases with Redis: one script call that settles any number of leases of one server.

Totals are exchanged, not differences: a server tells what it has used since it started, and Redis keeps what it has
granted the server since then. So a reply that was lost and a call that is repeated change nothing. Redis counts time by
its own clock, whatever the clocks of the servers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

LEASE_TTL: Final = 10
"""Seconds after which a server that is gone is not counted any more, and its concurrency is free again."""

_SCRIPT: Final = b"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local server, leaving, ttl = ARGV[1], ARGV[3] == '1', tonumber(ARGV[4]) * 1000000
if leaving then
  redis.call('ZREM', KEYS[2], server)
else
  redis.call('ZADD', KEYS[2], now, server)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ttl)
redis.call('PEXPIRE', KEYS[2], ttl / 1000)
local servers = math.max(redis.call('ZCARD', KEYS[2]), 1)
redis.call('SET', KEYS[3], ARGV[2], 'NX')
local epoch = redis.call('GET', KEYS[3])
local reply = {tonumber(epoch), servers}

local function held(before, free, least, need, spare)
  local hold = 0
  if need > 0 and free >= least then
    hold = math.min(need, free)
  end
  hold = hold + math.max(math.min(spare, math.floor((free - hold) / servers)), 0)
  return math.max(hold, math.min(before, spare))
end

local function bucket(key, known, rate, most, left, granted, used, least, need, spare)
  local state = redis.call('HMGET', key, 'level', 'at', 'most', 'start')
  local level, start = most, most
  if state[1] then
    local more = math.max(now - state[2], 0) * rate / 60000000 + most - state[3]
    level, start = state[1] + more, math.min((state[4] or state[1]) + more, most)
  end
  if known ~= 0 and known ~= tonumber(epoch) and left < start then
    level, start = level + left - start, left
  end
  level = math.min(level, most)
  granted = tonumber(redis.call('HGET', KEYS[1], key) or granted)
  local hold = held(granted - used, math.floor(level + granted - used), least, need, spare)
  level = math.min(level + granted - used - hold, most)
  local number = '%.17g'
  redis.call('HSET', key, 'level', number:format(level), 'start', number:format(start))
  redis.call('HSET', key, 'at', string.format('%.0f', now), 'most', most)
  local kept = 62 * 86400000
  if rate > 0 then
    kept = math.min(kept, math.ceil((most - level) / rate * 60000) + 60000)
  end
  redis.call('PEXPIRE', key, string.format('%.0f', kept))
  redis.call('HSET', KEYS[1], key, string.format('%.0f', used + hold))
  return used + hold, math.floor(level)
end

local function slots(key, most, used, least, need, spare)
  local free, before = most - used, 0
  local all = redis.call('HGETALL', key)
  for j = 1, #all, 2 do
    local count, expiry = string.match(all[j + 1], '(%d+) (%d+)')
    if tonumber(expiry) < now then
      redis.call('HDEL', key, all[j])
    elseif all[j] == server then
      before = count - used
    else
      free = free - count
    end
  end
  local hold = held(before, free, least, need, spare)
  if used + hold > 0 then
    redis.call('HSET', key, server, string.format('%.0f %.0f', used + hold, now + ttl))
    redis.call('PEXPIRE', key, ttl / 1000)
  else
    redis.call('HDEL', key, server)
  end
  return used + hold, free - hold
end

for i = 4, #KEYS do
  local a = {}
  for number in string.gmatch(ARGV[i + 1], '%S+') do
    a[#a + 1] = tonumber(number)
  end
  local granted, left
  if a[1] == 0 then
    granted, left = bucket(KEYS[i], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])
  else
    granted, left = slots(KEYS[i], a[4], a[7], a[8], a[9], a[10])
  end
  reply[#reply + 1] = granted
  reply[#reply + 1] = left
end
if leaving then
  redis.call('DEL', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], 3600000)
end
return reply
"""
_NUMBERS: Final = " ".join(["%d"] * 10)
"""A lease in an exchange: all of a ``LeaseItem`` but its key."""
_PREFIX: Final = "nerite:{quota}"
"""Beginning of all keys. The braces keep them on one node of a Redis cluster."""


class LeaseItem(NamedTuple):
    """What a server tells about one lease, and asks for."""

    key: str
    slots: bool
    """Concurrency, which comes back when a request ends; else a token bucket."""
    epoch: int
    """Epoch of the data in Redis when ``left`` was told; 0 if nothing was. Another epoch: Redis has lost its data."""
    per_minute: int
    most: int
    """Burst of the bucket, or maximum concurrency."""
    left: int
    """What is thought to be left in Redis: restored if its data were lost."""
    granted: int
    """Total that was granted."""
    used: int
    """Total that was used; requests under way, if it is concurrency."""
    least: int
    """Amount below which nothing is granted to waiting requests, because none of them could use it."""
    need: int
    """Amount that waiting requests need."""
    spare: int
    """Amount to hold beyond that. The server keeps what it has of it; new is no more than its share of what is left."""


class LeaseGrant(NamedTuple):
    """Answer to one ``LeaseItem``."""

    granted: int
    """Total that is granted now; the concurrency that the server has, used or not."""
    left: int
    """What is left for all servers; negative if more was used than granted."""


class ExchangeReply(NamedTuple):
    """Answer of Redis to one exchange."""

    epoch: int
    servers: int
    """Number of servers that exchange leases, this one included."""
    grants: list[LeaseGrant]


def exchange_command(server: str, epoch: int, items: Sequence[LeaseItem], *, leaving: bool = False) -> list[bytes]:
    """Return the command of an exchange. ``epoch``: a new number, which identifies the data if Redis has none yet.

    ``leaving``: the server ends, and is not counted any more.
    """
    keys = [f"{_PREFIX}:granted:{server}", f"{_PREFIX}:servers", f"{_PREFIX}:epoch"]
    keys += [f"{_PREFIX}:{item.key}" for item in items]
    arguments = [server, str(epoch), str(int(leaving)), str(LEASE_TTL)]
    arguments += [_NUMBERS % item[1:] for item in items]
    return [b"EVAL", _SCRIPT, b"%d" % len(keys), *(word.encode() for word in (*keys, *arguments))]


def read_exchange(reply: list[int], count: int) -> ExchangeReply:
    """Return the answer to an exchange of ``count`` leases. Raises ``ValueError`` if it is none."""
    if len(reply) != 2 + 2 * count:
        raise ValueError(f"a reply of {len(reply)} numbers to an exchange of {count} leases")
    grants = [LeaseGrant(granted, left) for granted, left in zip(reply[2::2], reply[3::2], strict=True)]
    return ExchangeReply(reply[0], max(reply[1], 1), grants)
