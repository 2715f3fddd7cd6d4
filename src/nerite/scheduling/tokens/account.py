"""What a tenant may use at a time, over all models, and what it has used of that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from nerite.scheduling.tokens.bucket import Bucket
from nerite.scheduling.tokens.policy import Policy, Rate, Tenant
from nerite.scheduling.tokens.refusal import Fault, Limit, Refusal, pause

_RETRIES: Final = 10
"""That somebody who made none for a while may make at once."""
_WHOLE: Final = 1_000
"""Parts that a retry is counted in."""


class RetryBudget:
    """Lets a part of all requests be retries: each that is none allows for a part of one more."""

    __slots__ = ("_each", "_saved")

    def __init__(self, fraction: float) -> None:
        self._saved = _RETRIES * _WHOLE
        self.change(fraction)

    def change(self, fraction: float) -> None:
        """Go on by another fraction."""
        self._each = round(fraction * _WHOLE)

    @property
    def left(self) -> int:
        """Retries that may come now."""
        return self._saved // _WHOLE

    def allows(self, retry: bool) -> bool:
        """Count a request; return whether it may come."""
        if not retry:
            self._saved = min(self._saved + self._each, _RETRIES * _WHOLE)
            return True
        if self._each == _WHOLE:
            return True
        if self._saved < _WHOLE:
            return False
        self._saved -= _WHOLE
        return True


@dataclass(frozen=True, slots=True)
class RateUse:
    """One bucket, for ``nerite quota``."""

    limit: Limit
    per_minute: int
    burst: int
    left: int
    """Below 0: what is owed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a tenant has in use, for ``nerite quota``."""

    tenant: str
    under_way: int
    concurrency: int
    """As many may be under way. 0: any number."""
    retries_left: int
    rates: list[RateUse]


class Account:
    """Of one tenant. A limit that the policy does not set has no bucket."""

    __slots__ = ("_buckets", "retries", "tenant", "under_way")

    def __init__(self, tenant: Tenant, now: int) -> None:
        self.tenant = tenant
        self.under_way = 0
        """Requests that wait or run."""
        self.retries = RetryBudget(tenant.retry_fraction)
        self._buckets: dict[Limit, Bucket] = {}
        self.change(tenant, now)

    def change(self, tenant: Tenant, now: int) -> None:
        """Go on by another policy. What was used stays used."""
        self.tenant = tenant
        self.retries.change(tenant.retry_fraction)
        for limit, rate in _rates(tenant):
            bucket = self._buckets.get(limit)
            if not rate.per_minute:
                self._buckets.pop(limit, None)
            elif bucket is None:
                self._buckets[limit] = Bucket(rate.per_minute, rate.burst, now)
            else:
                bucket.change(rate.per_minute, rate.burst, now)

    def refusal(self, needs: dict[Limit, int], now: int) -> Refusal | None:
        """Return why a request that takes ``needs`` may not come; of several reasons the one that lasts longest."""
        tenant = self.tenant
        if Limit.CONCURRENCY in needs and 0 < tenant.concurrency <= self.under_way:
            return Refusal(
                limit=Limit.CONCURRENCY,
                fault=Fault.QUOTA,
                of=self._name,
                value=tenant.concurrency,
                use=self.under_way,
                text="too many requests under way",
                retry_after=1,
            )
        waits = [
            (math.inf if (wait := bucket.until(count, now)) is None else wait, limit)
            for limit, count in needs.items()
            if count and (bucket := self._buckets.get(limit)) is not None
        ]
        longest, limit = max(waits, default=(0, Limit.CONCURRENCY))
        if not longest:
            return None
        bucket = self._buckets[limit]
        never = longest == math.inf
        text = f"the request needs {needs[limit]}"
        return Refusal(
            limit=limit,
            fault=Fault.QUOTA,
            of=self._name,
            value=bucket.per_minute,
            use=f"{bucket.level(now)} left of {bucket.burst}",
            text=f"{text}, more than may be used at once" if never else text,
            retry_after=None if never else pause(longest),
        )

    def charge(self, needs: dict[Limit, int], now: int) -> None:
        """Take what a request needs."""
        self.under_way += needs.get(Limit.CONCURRENCY, 0)
        for limit, count in needs.items():
            if (bucket := self._buckets.get(limit)) is not None:
                bucket.take(count, now)

    def leave(self, needs: dict[Limit, int]) -> None:
        """Note that a request that was charged for ``needs`` is over."""
        self.under_way -= needs.get(Limit.CONCURRENCY, 0)

    def settle(self, limit: Limit, unused: int, now: int) -> None:
        """Give back what was charged and not used; below 0: owe what was used and not charged."""
        bucket = self._buckets.get(limit)
        if bucket is None:
            return
        if unused > 0:
            bucket.give_back(unused, now)
        else:
            bucket.take(-unused, now)

    def burst(self, limit: Limit) -> int | None:
        """Return what may be used of something at once; None if there is no limit."""
        bucket = self._buckets.get(limit)
        return None if bucket is None else bucket.burst

    def standing(self, now: int) -> Standing:
        """Return how much of everything is in use."""
        rates = [RateUse(limit, each.per_minute, each.burst, each.level(now)) for limit, each in self._buckets.items()]
        return Standing(self.tenant.name, self.under_way, self.tenant.concurrency, self.retries.left, rates)

    def retry_refusal(self) -> Refusal:
        """Return why a retry may not come."""
        return Refusal(
            limit=Limit.RETRIES,
            fault=Fault.QUOTA,
            of=self._name,
            value=self.tenant.retry_fraction,
            use="used up",
            text="too many of the requests are retries",
        )

    @property
    def _name(self) -> str:
        return f"tenant '{self.tenant.name}'"


class Accounts:
    """Of all tenants. Those nobody knows share one, so there are never more than the policy has tenants, and one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accounts: dict[str, Account] = {}

    def of(self, tenant: str, now: int) -> Account:
        """Return the account of a tenant."""
        known = self.policy.tenant(tenant)
        account = self._accounts.get(known.name)
        if account is None:
            account = self._accounts[known.name] = Account(known, now)
        return account

    def follow(self, policy: Policy, now: int) -> None:
        """Go on by another policy. Who is in it no more is nobody from now on."""
        self.policy = policy
        self._accounts = {name: each for name, each in self._accounts.items() if policy.tenant(name).name == name}
        for name, account in self._accounts.items():
            account.change(policy.tenant(name), now)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())


def _rates(tenant: Tenant) -> tuple[tuple[Limit, Rate], ...]:
    return (
        (Limit.INPUT_RATE, tenant.input_tokens),
        (Limit.OUTPUT_RATE, tenant.output_tokens),
        (Limit.REQUEST_RATE, tenant.requests),
        (Limit.BYTE_RATE, tenant.bytes),
    )
