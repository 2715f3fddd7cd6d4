"""The leases of one server, and what it exchanges with Redis to keep them. Pure: the owner sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from nerite.admission.lease_exchange import LeaseItem, exchange_command, read_exchange
from nerite.admission.leases import ConcurrencyLease, Lease, QuotaLease

MOST_ITEMS: Final = 100
"""Maximum number of leases in one exchange: Redis and the loop of the server do nothing else meanwhile."""
TICKS: Final = 10
"""Number of ticks a second, each of which looks at a part of the leases."""


class LeaseBook:
    """All leases of one server, and the exchanges with Redis that keep them. One exchange is under way at a time."""

    def __init__(self, server: str, wake: Callable[[], None], now: int, month: str, share: float | None = None) -> None:
        """``server`` identifies this server among all. ``wake``: called when there is something to exchange.

        ``month``: the calendar month, of which monthly quotas are. ``share``: fraction of each quota that this server
        admits without Redis; None for one part of as many as there were servers.
        """
        self.away = True
        self.away_since = now
        self.waits = 0
        """Number of requests that had to wait for Redis."""
        self.servers = 1
        self.epoch = 0
        self.offers = 0
        self._connected = False
        self._server = server
        self._wake = wake
        self._month = month
        self._share = share
        self._leases: dict[tuple[str, str], Lease] = {}
        """Leases by tenant and limit. Those of a policy that is not in force any more stay, with nothing in them."""
        self._monthly: set[QuotaLease] = set()
        self._active: set[Lease] = set()
        """Leases of which something is held, used or owed."""
        self._round: list[Lease] = []
        """Those at the beginning of this second."""
        self._ticks = 0
        self._heartbeat = False
        self._due: dict[Lease, None] = {}
        """Leases to exchange, in the order in which they became due."""
        self._exchanged: list[tuple[Lease, str]] | None = None
        """Leases, with their keys, of the exchange that is under way."""

    @property
    def share(self) -> float:
        """Fraction of each quota that this server admits while Redis is away."""
        return 1 / self.servers if self._share is None else self._share

    @property
    def away_text(self) -> str:
        """End of a sentence about a refusal: says that Redis is away, if it is."""
        return f"; Redis is not reached, so this server admits {self.share:.3g} of the quota" if self.away else ""

    def follow(self, share: float | None) -> None:
        """Change the share, from the next time on that Redis is away."""
        self._share = share

    @property
    def leases(self) -> Iterable[Lease]:
        """Leases of which something is held, used or owed."""
        return [lease for lease in self._leases.values() if lease in self._active]

    def quota(self, tenant: str, limit: str, per_minute: int, burst: int, now: int) -> QuotaLease:
        """Return the lease of a token bucket. Initially nothing is held."""
        lease = self._leases.get((tenant, limit))
        if not isinstance(lease, QuotaLease):
            lease = self._leases[tenant, limit] = QuotaLease(self, tenant, limit, burst, now, per_minute)
        lease.change(per_minute, burst, now)
        return lease

    def monthly_quota(self, tenant: str, limit: str, amount: int, now: int) -> QuotaLease:
        """Return the lease of an amount that a tenant may use in each calendar month."""
        lease = self.quota(tenant, limit, 0, amount, now)
        if lease not in self._monthly:
            self._monthly.add(lease)
            lease.renew(self._month, now)
        return lease

    def concurrency(self, tenant: str, limit: str, most: int, now: int) -> ConcurrencyLease:
        """Return the lease of a tenant's concurrency."""
        lease = self._leases.get((tenant, limit))
        if not isinstance(lease, ConcurrencyLease):
            lease = self._leases[tenant, limit] = ConcurrencyLease(self, tenant, limit, most, now)
        lease.change(most)
        return lease

    def close(self, lease: Lease) -> None:
        """Give a lease back whose quota the policy has no more. Requests under way still end with it."""
        lease.closed = True
        self.want(lease)

    def want(self, lease: Lease) -> None:
        """Exchange a lease as soon as possible."""
        self._active.add(lease)
        if lease not in self._due:
            self._due[lease] = None
            if len(self._due) == 1 and not self.away and self._exchanged is None:
                self._wake()

    def activate(self, lease: Lease) -> None:
        """Note that a lease is in use."""
        self._active.add(lease)

    def tick(self, now: int, month: str) -> None:
        """Find the leases that are due. To be called ``TICKS`` times a second, with an ``exchange`` after it."""
        if month != self._month:
            self._month = month
            for monthly in self._monthly:
                monthly.renew(month, now)
        if not self._ticks:
            self._round = [*self._active]
            self._heartbeat = True
        for lease in self._round[self._ticks :: TICKS]:
            if lease.is_due(now):
                self._due[lease] = None
            elif lease not in self._due and lease.is_dormant(now):
                self._active.discard(lease)
        self._ticks = (self._ticks + 1) % TICKS

    def exchange(self, now: int) -> list[bytes] | None:
        """Return the command for leases that are due; None if there is none, or an exchange is under way.

        Once a second there is one in any case, so that others know of this server.
        """
        if not self._connected or self._exchanged is not None or not (self._due or self._heartbeat or self.away):
            return None
        self._heartbeat = False
        # After an outage, Redis must first answer: what was used meanwhile is told only once.
        leases = [] if self.away else [*self._due][:MOST_ITEMS]
        for lease in leases:
            self._due.pop(lease)
        self._exchanged = [(lease, lease.key) for lease in leases]
        return self._command([lease.item(now) for lease in leases], now)

    def answered(self, reply: list[int], now: int) -> None:
        """Record the reply to an exchange. Requests that wait must be offered again. Raises ``ValueError``."""
        exchanged, self._exchanged = self._exchanged or [], None
        found = read_exchange(reply, len(exchanged))
        has_lost_data = self.epoch not in (0, found.epoch)
        self.epoch, self.servers = found.epoch, found.servers
        if self.away:
            self.away = False
            for lease in self._active:
                lease.returned(now)
                self._due[lease] = None
        for (lease, key), grant in zip(exchanged, found.grants, strict=True):
            if lease.key == key:
                lease.told(*grant, now)
        if has_lost_data:  # each lease tells what it knows to be left
            for lease in self._leases.values():
                if lease.is_outdated:
                    self._due[lease] = None
        self.offers += 1
        if self._due:
            self._wake()

    def lost(self, now: int) -> None:
        """Record that Redis cannot be reached, or refuses. Requests that wait must be offered again."""
        self._connected = False
        if not self.away:
            self.away, self.away_since = True, now
        for lease, _ in self._exchanged or ():
            self._due[lease] = None
        self._exchanged = None
        self.offers += 1

    def check(self, now: int) -> list[bytes]:
        """Return an exchange of nothing, which says whether Redis is fit for others."""
        return self._command([], now)

    def _command(self, items: list[LeaseItem], now: int, *, leaving: bool = False) -> list[bytes]:
        return exchange_command(self._server, max(now // 1000, 1), items, leaving=leaving)

    def connected(self) -> None:
        """Record that Redis can be reached. It is away until it has answered."""
        self._connected = True
        self._wake()

    def last_exchange(self, now: int) -> list[bytes] | None:
        """Return the command that gives everything back at the end of the server; None if Redis is away."""
        if self.away:
            return None
        items = []
        for lease in self._active:
            lease.closed = True
            items.append(lease.item(now))
        return self._command(items, now, leaving=True)
