"""Leases of quotas that servers share: a server takes amounts ahead from Redis, and admits requests from what it holds.

Pure deciders without I/O; a ``LeaseBook`` has those of one server. A lease follows the use of the last second, is
renewed when half of it is used, and goes back when it is not used.

Without Redis, a lease goes on to what was granted, and then to a share of the quota. What was used meanwhile is told
when Redis is back. A request waits for Redis only if the lease does not cover it, and Redis may have more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, Protocol

from nerite.admission.lease_exchange import LeaseItem
from nerite.admission.token_bucket import MINUTE, TokenBucket

_SECOND: Final = 1_000_000_000
_FRESH: Final = _SECOND // 10
"""Nanoseconds for which Redis is not asked again for more than it had."""
_IDLE: Final = 10 * _SECOND
"""Nanoseconds without use after which a lease goes back."""
_RENEWAL: Final = _SECOND * 9 // 10
"""Nanoseconds after which concurrency is renewed, lest it expire and to learn whether others wait for it."""
_DORMANT: Final = 1 << 62
"""Level below which a lease is renewed that nobody uses: the first use is told."""


class LeaseOwner(Protocol):
    """What leases know of Redis and of the other servers, and whom they tell that they have to be renewed."""

    away: bool
    """Redis does not answer."""
    away_since: int
    servers: int
    """Number of servers that share the quotas, when Redis was asked last."""
    epoch: int
    """Identifies the data in Redis: a new one says that they were lost."""
    offers: int
    """How often requests that wait were offered again: each time, their leases are asked for what they need."""

    @property
    def share(self) -> float:
        """Fraction of each quota that this server admits while Redis is away."""

    def want(self, lease: Lease) -> None:
        """Exchange a lease as soon as possible."""

    def activate(self, lease: Lease) -> None:
        """Note that a lease is in use."""


class Lease(ABC):
    """What one server may use of one quota of one tenant."""

    __slots__ = (
        "_epoch",
        "_floor",
        "_least",
        "_need",
        "_needed_at",
        "_owner",
        "_told_at",
        "_used_at",
        "closed",
        "granted",
        "key",
        "left",
        "limit",
        "most",
        "tenant",
        "used",
    )

    def __init__(self, owner: LeaseOwner, tenant: str, limit: str, most: int, now: int) -> None:
        self._owner = owner
        self.tenant = tenant
        self.limit = limit
        self.key = f"{tenant}:{limit}"
        """Names the quota among all of the servers that share it."""
        self.most = most
        """Burst, or maximum concurrency."""
        self.granted = 0
        """Total that Redis has granted; concurrency that it grants."""
        self.used = 0
        """Total that was used; requests under way."""
        self.left = most
        """What was left in Redis when it was asked last."""
        self.closed = False
        """The policy has the quota no more: all goes back."""
        self._epoch = 0
        self._told_at = now - _SECOND
        self._used_at = now
        self._floor = _DORMANT
        self._least = self._need = 0
        """What waiting requests need, since they were offered the last time: all together, and the smallest."""
        self._needed_at = -1

    @property
    def held(self) -> int:
        """Amount that was granted and not used; negative if more was used."""
        return self.granted - self.used

    @property
    def is_outdated(self) -> bool:
        """What Redis has told is of data that it has lost."""
        return self._epoch not in (0, self._owner.epoch)

    def pending(self, count: int, now: int) -> bool:
        """Return whether a request for ``count`` must wait for Redis, which is asked then."""
        held = self.granted - self.used
        if held >= count or self._owner.away or count > self.most:
            return False
        if now - self._told_at < _FRESH and count > held + self.left_at(now):
            return False
        if self._needed_at != self._owner.offers:
            self._needed_at = self._owner.offers
            self._least, self._need = count, 0
        self._least = min(self._least, count)
        self._need += count
        self._owner.want(self)
        return True

    def item(self, now: int) -> LeaseItem:
        """Return what to tell Redis, and to ask for."""
        spare = self._spare(now)
        self._floor = self._renewed_below(now)
        need, least = (self._need, self._least) if self._needed_at == self._owner.offers else (0, 0)
        granted = self.granted
        self.granted = min(granted, self.used + spare)  # what is offered back is not used any more
        return LeaseItem(
            self.key, self.slots, self._epoch, self.per_minute, self.most, self.left_at(now), granted, self.used,
            least, need, spare,
        )  # fmt: skip

    def told(self, granted: int, left: int, now: int) -> None:
        """Record the answer of Redis."""
        self.granted = granted
        self.left = left
        self._told_at = now
        self._epoch = self._owner.epoch

    def is_due(self, now: int) -> bool:
        """Return whether Redis has to be told something, though no request has needed it."""
        spare = self._spare(now)
        self._floor = self._renewed_below(now)
        return self.held < self._floor or self.held > 2 * spare or self._is_old(now)

    def is_dormant(self, now: int) -> bool:
        """Return whether nothing is held or used any more."""
        idle = self.closed or now - self._used_at > _IDLE
        if idle and not self.held and not self._in_use:
            self._floor = _DORMANT
            return True
        return False

    @property
    @abstractmethod
    def slots(self) -> bool:
        """It is concurrency, which comes back at the end of a request."""

    @property
    @abstractmethod
    def per_minute(self) -> int:
        """Rate of the token bucket; 0 if it does not refill."""

    @property
    @abstractmethod
    def _in_use(self) -> bool:
        """It must be told something yet."""

    @abstractmethod
    def left_at(self, now: int) -> int:
        """Return what is thought to be left in Redis now."""

    @abstractmethod
    def returned(self, now: int) -> None:
        """Record that Redis is back: account for what was used meanwhile."""

    @abstractmethod
    def _spare(self, now: int) -> int:
        """Return the amount to hold."""

    @abstractmethod
    def _renewed_below(self, now: int) -> int:
        """Return the amount below which more is taken."""

    @abstractmethod
    def _is_old(self, now: int) -> bool:
        """Return whether it has to be renewed lest it expire."""


class QuotaLease(Lease):
    """Lease of a token bucket that all servers share. Has the interface of the ``TokenBucket`` it replaces.

    While Redis is away and the lease is used up, a token bucket with this server's share of rate and burst replaces it.
    """

    __slots__ = ("_decayed_at", "_largest", "_outage", "_peak", "_per_minute", "_recent", "_unused")

    slots = False

    def __init__(self, owner: LeaseOwner, tenant: str, limit: str, burst: int, now: int, per_minute: int = 0) -> None:
        super().__init__(owner, tenant, limit, burst, now)
        self._per_minute = per_minute
        self._recent = 0.0
        """Use of the last second, decaying."""
        self._decayed_at = now
        self._largest = self._peak = 0
        """The largest amount used at once, halved with each exchange; and that since the last one."""
        self._outage: TokenBucket | None = None
        """What this server may use while Redis is away."""
        self._unused: TokenBucket | None = None
        """The same, as it would be if nothing had been used."""

    @property
    def per_minute(self) -> int:
        """Rate of the token bucket; 0 if it does not refill."""
        return self._per_minute

    @property
    def burst(self) -> int:
        """Capacity of the token bucket."""
        return self.most

    def level(self, now: int) -> int:
        """Return how much the tenant may use here at once: what is held, and what is left for all servers."""
        if self._owner.away:
            return self.held + self._share(now).level(now)
        return self.held + self.left_at(now)

    def until(self, count: int, now: int) -> int | None:
        """Return the nanoseconds until ``count`` is available: 0 if it is, None if it never will be."""
        held = self.granted - self.used
        if held >= count:
            return 0
        if count > self.most:
            return None
        if self._owner.away:
            share = self._share(now)
            # What exceeds the share may be used once it is full: else no request of that size would be admitted.
            return share.until(min(count, share.burst), now) if share.burst else _SECOND
        missing = count - held - self.left_at(now)
        return max(missing, 1) * MINUTE // self._per_minute if self._per_minute else None

    def take(self, count: int, now: int) -> None:
        """Use ``count``, even if more is used than granted."""
        if self._owner.away and self.granted - self.used < count:
            self._share(now).take(count, now)
            return
        self.used += count
        self._recent += count
        self._used_at = now
        if count > self._peak:
            self._peak = count
        if self.granted - self.used < self._floor:
            self._owner.want(self)

    def give_back(self, count: int, now: int) -> None:
        """Return what was not used after all."""
        if self._outage is not None:
            self._outage.give_back(count, now)
        else:
            self.used = max(self.used - count, 0)
            self._owner.activate(self)

    def change(self, per_minute: int, burst: int, now: int) -> None:
        """Change rate and burst. What was used stays used."""
        if (per_minute, burst) == (self._per_minute, self.most) and not self.closed:
            return
        self.left = min(self.left_at(now) + burst - self.most, burst)
        self._per_minute, self.most, self.closed = per_minute, burst, False
        self._owner.want(self)

    def renew(self, month: str, now: int) -> None:
        """Begin a month, with a quota of its own."""
        self.key = f"{self.tenant}:{self.limit}:{month}"
        self.granted = self.used = self._epoch = 0
        self.left = self.most
        self._told_at = now - _SECOND
        self._outage = self._unused = None
        self._floor = _DORMANT

    def left_at(self, now: int) -> int:
        """Return what is thought to be left in Redis now."""
        refilled = max(now - self._told_at, 0) * self._per_minute // MINUTE
        return min(self.left + refilled, self.most)

    def returned(self, now: int) -> None:
        """Record that Redis is back: what was used of this server's share is owed, but for what refilled meanwhile."""
        if self._outage is not None and self._unused is not None:
            self.used += max(self._unused.level(now) - self._outage.level(now), 0)
            self._outage = self._unused = None

    def _share(self, now: int) -> TokenBucket:
        if self._outage is None:
            share, since = self._owner.share, self._owner.away_since
            burst = max(round(self.most * share), 1) if share else 0
            rate = max(round(self._per_minute * share), 1) if share and self._per_minute else 0
            missing = max(burst - int(max(self.left_at(since), 0) * share), 0)
            self._outage, self._unused = TokenBucket(rate, burst, since), TokenBucket(rate, burst, since)
            for bucket in (self._outage, self._unused):
                bucket.take(missing, since)
            self._owner.activate(self)
        return self._outage

    def _spare(self, now: int) -> int:
        if self.closed or now - self._used_at > _IDLE:
            return 0
        self._recent *= math.exp((self._decayed_at - now) / _SECOND)
        self._decayed_at = now
        return int(self._recent) + 2 * self._reserve

    def item(self, now: int) -> LeaseItem:
        """Return what to tell Redis, and to ask for."""
        self._largest, self._peak = max(self._peak, self._largest // 2), 0
        return super().item(now)

    def _renewed_below(self, now: int) -> int:
        if self.closed or now - self._used_at > _IDLE:
            return 0
        return int(self._recent) // 2 + self._reserve

    @property
    def _reserve(self) -> int:
        """Amount for the next request, if it does not matter to others."""
        return max(self._largest, self._peak) if 2 * self.left >= self.most else 0

    @property
    def _in_use(self) -> bool:
        return self._outage is not None

    def _is_old(self, _now: int) -> bool:
        return False


class ConcurrencyLease(Lease):
    """Lease of a tenant's concurrency: a number of requests that may be under way on this server.

    It expires in Redis if the server does not renew it. While Redis is away, the server has at least its share.
    """

    __slots__ = ()

    slots = True
    per_minute = 0

    def until(self, now: int) -> int:
        """Return the nanoseconds after which another request may be admitted, as far as is known; 0 for now."""
        if self.granted > self.used:
            return 0
        if self._owner.away and self.used < math.ceil(self.most * self._owner.share):
            return 0
        return _SECOND if self._owner.away or now - self._told_at < _FRESH else _FRESH

    def take(self, now: int) -> None:
        """Record a request that is under way."""
        self.used += 1
        self._used_at = now
        if self.granted - self.used < self._floor:
            self._owner.want(self)

    def leave(self, now: int) -> None:
        """Record that a request has ended. If others wait for its place, it goes back at once."""
        self.used -= 1
        self._used_at = now
        if self._scarce or self.closed:
            self._owner.want(self)

    def told(self, granted: int, left: int, now: int) -> None:
        """Record the answer of Redis. If nothing is left for others, what is not in use goes back at once."""
        super().told(granted, left, now)
        if self._scarce and self.held > 0:
            self._owner.want(self)

    def change(self, most: int) -> None:
        """Change the maximum concurrency. Requests under way stay under way."""
        if most != self.most or self.closed:
            self.most, self.closed = most, False
            self._owner.want(self)

    def left_at(self, _now: int) -> int:
        """Return what is thought to be left in Redis now."""
        return self.left

    def returned(self, now: int) -> None:
        """Record that Redis is back, which is told the number of requests under way."""

    def _spare(self, now: int) -> int:
        if self.closed or self._scarce or (not self.used and now - self._used_at > _IDLE):
            return 0
        return max(self.used // 4, 1)

    def _renewed_below(self, now: int) -> int:
        return (self._spare(now) + 1) // 2

    @property
    def _scarce(self) -> bool:
        return self.left <= 0 and self._owner.servers > 1

    @property
    def _in_use(self) -> bool:
        return self.used > 0

    def _is_old(self, now: int) -> bool:
        return self.granted > 0 and now - self._told_at > _RENEWAL
