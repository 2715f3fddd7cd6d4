"""What a tenant may use at a time, over all models, and what it has used of that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from nerite.admission.policy import AdmissionPolicy, RateLimit, Tenant
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause, retry_pause

# A token bucket, exact for ever: it counts in whole numbers, whatever the clock says.

_MINUTE: Final = 60_000_000_000
"""Nanoseconds; also the parts that a token has in here. What comes in a nanosecond is then a whole number of parts."""


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_minute`` of them. Full at the beginning.

    It may owe: what was used beyond an estimate is taken out though it is not there.
    """

    __slots__ = ("_at", "_parts", "burst", "per_minute")

    def __init__(self, per_minute: int, burst: int, now: int) -> None:
        self.per_minute = per_minute
        self.burst = burst
        self._parts = burst * _MINUTE
        self._at = now

    def level(self, now: int) -> int:
        """Return how many whole tokens it has; below 0: how many it owes."""
        self._fill(now)
        return self._parts // _MINUTE

    def take(self, count: int, now: int) -> None:
        """Take tokens out, whether they are there or not."""
        self._fill(now)
        self._parts -= count * _MINUTE

    def give_back(self, count: int, now: int) -> None:
        """Put in what was taken and not used. What is above ``burst`` runs over."""
        self._fill(now)
        self._parts = min(self._parts + count * _MINUTE, self.burst * _MINUTE)

    def until(self, count: int, now: int) -> int | None:
        """Return the nanoseconds until ``count`` tokens are there: 0 if they are, None if they never will be."""
        self._fill(now)
        missing = count * _MINUTE - self._parts
        if missing <= 0:
            return 0
        if count > self.burst or not self.per_minute:
            return None
        return -(-missing // self.per_minute)

    def change(self, per_minute: int, burst: int, now: int) -> None:
        """Go on by other figures. What was used stays used."""
        self._fill(now)
        self._parts = min(self._parts + (burst - self.burst) * _MINUTE, burst * _MINUTE)
        self.per_minute = per_minute
        self.burst = burst

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._parts = min(self._parts + (now - self._at) * self.per_minute, self.burst * _MINUTE)
            self._at = now


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

    limit: QuotaLimit
    per_minute: int
    burst: int
    left: int
    """Below 0: what is owed."""


@dataclass(frozen=True, slots=True)
class QuotaStanding:
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
        self._buckets: dict[QuotaLimit, TokenBucket] = {}
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
                self._buckets[limit] = TokenBucket(rate.per_minute, rate.burst, now)
            else:
                bucket.change(rate.per_minute, rate.burst, now)

    def refusal(self, needs: dict[QuotaLimit, int], now: int) -> AdmissionRefusal | None:
        """Return why a request that takes ``needs`` may not come; of several reasons the one that lasts longest."""
        tenant = self.tenant
        if QuotaLimit.CONCURRENCY in needs and 0 < tenant.concurrency <= self.under_way:
            return AdmissionRefusal(
                limit=QuotaLimit.CONCURRENCY,
                fault=RefusalCause.QUOTA,
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
        longest, limit = max(waits, default=(0, QuotaLimit.CONCURRENCY))
        if not longest:
            return None
        bucket = self._buckets[limit]
        never = longest == math.inf
        text = f"the request needs {needs[limit]}"
        return AdmissionRefusal(
            limit=limit,
            fault=RefusalCause.QUOTA,
            of=self._name,
            value=bucket.per_minute,
            use=f"{bucket.level(now)} left of {bucket.burst}",
            text=f"{text}, more than may be used at once" if never else text,
            retry_after=None if never else retry_pause(longest),
        )

    def charge(self, needs: dict[QuotaLimit, int], now: int) -> None:
        """Take what a request needs."""
        self.under_way += needs.get(QuotaLimit.CONCURRENCY, 0)
        for limit, count in needs.items():
            if (bucket := self._buckets.get(limit)) is not None:
                bucket.take(count, now)

    def leave(self, needs: dict[QuotaLimit, int]) -> None:
        """Note that a request that was charged for ``needs`` is over."""
        self.under_way -= needs.get(QuotaLimit.CONCURRENCY, 0)

    def settle(self, limit: QuotaLimit, unused: int, now: int) -> None:
        """Give back what was charged and not used; below 0: owe what was used and not charged."""
        bucket = self._buckets.get(limit)
        if bucket is None:
            return
        if unused > 0:
            bucket.give_back(unused, now)
        else:
            bucket.take(-unused, now)

    def burst(self, limit: QuotaLimit) -> int | None:
        """Return what may be used of something at once; None if there is no limit."""
        bucket = self._buckets.get(limit)
        return None if bucket is None else bucket.burst

    def standing(self, now: int) -> QuotaStanding:
        """Return how much of everything is in use."""
        rates = [RateUse(limit, each.per_minute, each.burst, each.level(now)) for limit, each in self._buckets.items()]
        return QuotaStanding(self.tenant.name, self.under_way, self.tenant.concurrency, self.retries.left, rates)

    def retry_refusal(self) -> AdmissionRefusal:
        """Return why a retry may not come."""
        return AdmissionRefusal(
            limit=QuotaLimit.RETRIES,
            fault=RefusalCause.QUOTA,
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

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self._accounts: dict[str, Account] = {}

    def of(self, tenant: str, now: int) -> Account:
        """Return the account of a tenant."""
        known = self.policy.tenant(tenant)
        account = self._accounts.get(known.name)
        if account is None:
            account = self._accounts[known.name] = Account(known, now)
        return account

    def follow(self, policy: AdmissionPolicy, now: int) -> None:
        """Go on by another policy. Who is in it no more is nobody from now on."""
        self.policy = policy
        self._accounts = {name: each for name, each in self._accounts.items() if policy.tenant(name).name == name}
        for name, account in self._accounts.items():
            account.change(policy.tenant(name), now)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())


def _rates(tenant: Tenant) -> tuple[tuple[QuotaLimit, RateLimit], ...]:
    return (
        (QuotaLimit.INPUT_RATE, tenant.input_tokens),
        (QuotaLimit.OUTPUT_RATE, tenant.output_tokens),
        (QuotaLimit.REQUEST_RATE, tenant.requests),
        (QuotaLimit.BYTE_RATE, tenant.bytes),
    )


# What was used and what was refused, by tenant and class: for metrics, bills and ``nerite quota``.


@dataclass(slots=True)
class TokenUse:
    """The counts of one tenant in one class, since the beginning. For reading."""

    offered: int = 0
    """Requests that came."""
    admitted: int = 0
    input_tokens: int = 0
    """Of admitted requests that were not refused after all; bytes of a model that is no LLM."""
    output_tokens: int = 0
    wasted_tokens: int = 0
    """Of ``output_tokens``: those that were generated when the client had gone."""
    joined: int = 0
    """Requests that got the answer of an earlier one with the same key. They are not among ``offered``."""
    retries: int = 0
    """Of ``offered``: those that said they were."""
    refused: dict[QuotaLimit, int] = field(default_factory=dict)
    withdrawn: int = 0
    """Clients that gave up while they waited."""
    finished: dict[str, int] = field(default_factory=dict)
    """Admitted requests that ended, by the reason they were told with."""
    finished_tokens: dict[str, int] = field(default_factory=dict)
    """Their output tokens, by the same reason: what was answered in part shows here."""

    def refuse(self, limit: QuotaLimit) -> None:
        """Count a refusal."""
        self.refused[limit] = self.refused.get(limit, 0) + 1

    def finish(self, reason: str, tokens: int) -> None:
        """Count an ending."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.finished_tokens[reason] = self.finished_tokens.get(reason, 0) + tokens


class UsageTable:
    """The counts of one model."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], TokenUse] = {}

    def of(self, tenant: str, level: str) -> TokenUse:
        """Return the counts of a tenant in a class, to be added to."""
        use = self._uses.get((tenant, level))
        if use is None:
            use = self._uses[tenant, level] = TokenUse()
        return use

    def items(self) -> list[tuple[str, str, TokenUse]]:
        """Return tenant, class and counts of all that were seen."""
        return [(tenant, level, use) for (tenant, level), use in self._uses.items()]
