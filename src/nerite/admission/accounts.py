"""Quotas of tenants over all models: token buckets for rates, concurrency, retry budgets, and usage counters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from nerite.admission.policy import AdmissionPolicy, RateLimit, Tenant
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause, retry_pause

_MINUTE: Final = 60_000_000_000
"""Nanoseconds in a minute, and fractional parts per token, so that the refill per nanosecond is an integer."""


class TokenBucket:
    """Token bucket that holds up to ``burst`` tokens and gains ``per_minute`` of them. Initially full.

    Counts in integers, so it never accumulates rounding errors. The level may become negative: use beyond an estimate
    is taken even if the tokens are not there.
    """

    __slots__ = ("_at", "_parts", "burst", "per_minute")

    def __init__(self, per_minute: int, burst: int, now: int) -> None:
        self.per_minute = per_minute
        self.burst = burst
        self._parts = burst * _MINUTE
        self._at = now

    def level(self, now: int) -> int:
        """Return the number of whole tokens; negative if the bucket is in debt."""
        self._fill(now)
        return self._parts // _MINUTE

    def take(self, count: int, now: int) -> None:
        """Remove tokens, even if that makes the level negative."""
        self._fill(now)
        self._parts -= count * _MINUTE

    def give_back(self, count: int, now: int) -> None:
        """Return unused tokens. The level is capped at ``burst``."""
        self._fill(now)
        self._parts = min(self._parts + count * _MINUTE, self.burst * _MINUTE)

    def until(self, count: int, now: int) -> int | None:
        """Return the nanoseconds until ``count`` tokens are available: 0 if they are, None if they never will be."""
        self._fill(now)
        missing = count * _MINUTE - self._parts
        if missing <= 0:
            return 0
        if count > self.burst or not self.per_minute:
            return None
        return -(-missing // self.per_minute)

    def change(self, per_minute: int, burst: int, now: int) -> None:
        """Change rate and burst. Tokens already used stay used."""
        self._fill(now)
        self._parts = min(self._parts + (burst - self.burst) * _MINUTE, burst * _MINUTE)
        self.per_minute = per_minute
        self.burst = burst

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._parts = min(self._parts + (now - self._at) * self.per_minute, self.burst * _MINUTE)
            self._at = now


_RETRIES: Final = 10
"""Maximum number of saved-up retries."""
_WHOLE: Final = 1_000
"""Parts that a retry is counted in."""


class RetryBudget:
    """Retry budget: each request that is not a retry earns a fraction of one retry."""

    __slots__ = ("_each", "_saved")

    def __init__(self, fraction: float) -> None:
        self._saved = _RETRIES * _WHOLE
        self.change(fraction)

    def change(self, fraction: float) -> None:
        """Change the fraction."""
        self._each = round(fraction * _WHOLE)

    @property
    def left(self) -> int:
        """Number of retries that are allowed now."""
        return self._saved // _WHOLE

    def allows(self, retry: bool) -> bool:
        """Count a request; return whether it is allowed."""
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
    """State of one token bucket, for ``nerite quota``."""

    limit: QuotaLimit
    per_minute: int
    burst: int
    left: int
    """Negative if the bucket is in debt."""


@dataclass(frozen=True, slots=True)
class QuotaStanding:
    """Current usage of a tenant's quotas, for ``nerite quota``."""

    tenant: str
    under_way: int
    concurrency: int
    """Maximum number of concurrent requests; 0 for no limit."""
    retries_left: int
    rates: list[RateUse]


class Account:
    """Quotas of one tenant. A limit that the policy does not set has no bucket."""

    __slots__ = ("_buckets", "retries", "tenant", "under_way")

    def __init__(self, tenant: Tenant, now: int) -> None:
        self.tenant = tenant
        self.under_way = 0
        """Number of requests that wait or run."""
        self.retries = RetryBudget(tenant.retry_fraction)
        self._buckets: dict[QuotaLimit, TokenBucket] = {}
        self.change(tenant, now)

    def change(self, tenant: Tenant, now: int) -> None:
        """Apply the limits of a new policy. Quota already used stays used."""
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
        """Return a refusal if ``needs`` exceed a quota, for the one with the longest wait; else None."""
        tenant = self.tenant
        if QuotaLimit.CONCURRENCY in needs and 0 < tenant.concurrency <= self.under_way:
            return AdmissionRefusal(
                limit=QuotaLimit.CONCURRENCY,
                fault=RefusalCause.QUOTA,
                of=self._name,
                value=tenant.concurrency,
                use=self.under_way,
                text="too many concurrent requests",
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
            text=f"{text}, more than the burst allows" if never else text,
            retry_after=None if never else retry_pause(longest),
        )

    def charge(self, needs: dict[QuotaLimit, int], now: int) -> None:
        """Charge a request for ``needs``."""
        self.under_way += needs.get(QuotaLimit.CONCURRENCY, 0)
        for limit, count in needs.items():
            if (bucket := self._buckets.get(limit)) is not None:
                bucket.take(count, now)

    def leave(self, needs: dict[QuotaLimit, int]) -> None:
        """Release the concurrency of a request that was charged for ``needs`` and is over."""
        self.under_way -= needs.get(QuotaLimit.CONCURRENCY, 0)

    def settle(self, limit: QuotaLimit, unused: int, now: int) -> None:
        """Refund ``unused`` charges; if negative, charge what was used in addition."""
        bucket = self._buckets.get(limit)
        if bucket is None:
            return
        if unused > 0:
            bucket.give_back(unused, now)
        else:
            bucket.take(-unused, now)

    def burst(self, limit: QuotaLimit) -> int | None:
        """Return the burst of a limit; None if it is not set."""
        bucket = self._buckets.get(limit)
        return None if bucket is None else bucket.burst

    def standing(self, now: int) -> QuotaStanding:
        """Return the current usage of all quotas."""
        rates = [RateUse(limit, each.per_minute, each.burst, each.level(now)) for limit, each in self._buckets.items()]
        return QuotaStanding(self.tenant.name, self.under_way, self.tenant.concurrency, self.retries.left, rates)

    def retry_refusal(self) -> AdmissionRefusal:
        """Return the refusal of a retry that exceeds the budget."""
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
    """Accounts of all tenants. Unknown callers share one, so there is at most one more than the policy has tenants."""

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
        """Apply a new policy. Tenants that it no longer contains share the default account from now on."""
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


@dataclass(slots=True)
class TokenUse:
    """Counters of one tenant in one class since the server started: for metrics, billing and ``nerite quota``."""

    offered: int = 0
    """Requests received."""
    admitted: int = 0
    input_tokens: int = 0
    """Prompt tokens of requests admitted and not rejected later; bytes for models other than LLMs."""
    output_tokens: int = 0
    wasted_tokens: int = 0
    """Part of ``output_tokens`` that was generated after the client had gone."""
    joined: int = 0
    """Requests that shared the answer of an earlier one with the same key. Not included in ``offered``."""
    retries: int = 0
    """Part of ``offered`` that was marked as retries."""
    refused: dict[QuotaLimit, int] = field(default_factory=dict)
    withdrawn: int = 0
    """Requests whose clients gave up while waiting."""
    finished: dict[str, int] = field(default_factory=dict)
    """Admitted requests that ended, by reason."""
    finished_tokens: dict[str, int] = field(default_factory=dict)
    """Output tokens of ended requests by the same reason; shows partial answers."""

    def refuse(self, limit: QuotaLimit) -> None:
        """Count a rejected request."""
        self.refused[limit] = self.refused.get(limit, 0) + 1

    def finish(self, reason: str, tokens: int) -> None:
        """Count an admitted request that ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.finished_tokens[reason] = self.finished_tokens.get(reason, 0) + tokens


class UsageTable:
    """Usage counters of one model by tenant and class."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], TokenUse] = {}

    def of(self, tenant: str, level: str) -> TokenUse:
        """Return the mutable counters of a tenant in a class."""
        use = self._uses.get((tenant, level))
        if use is None:
            use = self._uses[tenant, level] = TokenUse()
        return use

    def items(self) -> list[tuple[str, str, TokenUse]]:
        """Return tenant, class and counters of all combinations seen so far."""
        return [(tenant, level, use) for (tenant, level), use in self._uses.items()]
