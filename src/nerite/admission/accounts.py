"""Quotas of tenants over all models: token buckets for rates, concurrency, retry budgets, and usage counters.

With a ``LeaseBook`` all servers share the quotas: leases take the place of token buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Final

from nerite.admission.lease_book import LeaseBook
from nerite.admission.leases import ConcurrencyLease, QuotaLease
from nerite.admission.policy import AdmissionPolicy, RateLimit, Tenant
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause, retry_pause
from nerite.admission.token_bucket import TokenBucket
from nerite.ledger.prices import MILLION

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

    __slots__ = ("_buckets", "_budget", "_leases", "_places", "retries", "tenant", "under_way")

    def __init__(self, tenant: Tenant, now: int, leases: LeaseBook | None = None) -> None:
        """``leases``: all servers share the quotas."""
        self.tenant = tenant
        self.under_way = 0
        """Number of requests that wait or run."""
        self.retries = RetryBudget(tenant.retry_fraction)
        self._leases = leases
        self._buckets: dict[QuotaLimit, TokenBucket | QuotaLease] = {}
        self._budget: QuotaLease | None = None
        """Lease of the tokens of a month, if the tenant has a budget of them; also one of the buckets."""
        self._places: ConcurrencyLease | None = None
        """Lease of the concurrency, if all servers share it."""
        self.change(tenant, now)

    def change(self, tenant: Tenant, now: int) -> None:
        """Apply the limits of a new policy. Quota already used stays used."""
        self.tenant = tenant
        self.retries.change(tenant.retry_fraction)
        for limit, rate in _rates(tenant):
            bucket = self._buckets.get(limit)
            if not rate.per_minute:
                self._close(self._buckets.pop(limit, None))
            elif self._leases is not None:
                self._buckets[limit] = self._leases.quota(tenant.name, limit, rate.per_minute, rate.burst, now)
            elif bucket is None:
                self._buckets[limit] = TokenBucket(rate.per_minute, rate.burst, now)
            else:
                bucket.change(rate.per_minute, rate.burst, now)
        if self._leases is None:
            return
        self._budget = None
        for limit, amount in ((QuotaLimit.BUDGET, tenant.tokens_per_month), (QuotaLimit.MONEY, tenant.money_per_month)):
            if not amount:
                self._close(self._buckets.pop(limit, None))
                continue
            lease = self._buckets[limit] = self._leases.monthly_quota(tenant.name, limit, amount, now)
            if limit is QuotaLimit.BUDGET:
                self._budget = lease
        if tenant.concurrency:
            places = self._leases.concurrency(tenant.name, QuotaLimit.CONCURRENCY, tenant.concurrency, now)
            if self._places is None:
                places.used += self.under_way
            self._places = places
        elif self._places is not None:
            self._places.used -= self.under_way
            self._close(self._places)
            self._places = None

    def close(self) -> None:
        """Give back what is leased, because the policy has the tenant no more."""
        for lease in (*self._buckets.values(), self._places):
            self._close(lease)

    def _close(self, bucket: TokenBucket | QuotaLease | ConcurrencyLease | None) -> None:
        if self._leases is not None and isinstance(bucket, QuotaLease | ConcurrencyLease):
            self._leases.close(bucket)

    def pending(self, needs: dict[QuotaLimit, int], now: int) -> bool:
        """Return whether a request must wait until Redis has been asked for ``needs``, which it is then."""
        if self._leases is None:
            return False
        if self._budget is not None:
            needs = self._with_budget(needs)
        waits = False
        for limit, count in needs.items():
            if count and (bucket := self._buckets.get(limit)) is not None and bucket.pending(count, now):
                waits = True
        if self._places is not None and QuotaLimit.CONCURRENCY in needs and self._places.pending(1, now):
            waits = True
        self._leases.waits += waits
        return waits

    @staticmethod
    def _with_budget(needs: dict[QuotaLimit, int]) -> dict[QuotaLimit, int]:
        """Return ``needs`` with the tokens of all kinds together, of which the tenant has a budget."""
        return {**needs, QuotaLimit.BUDGET: sum(needs.get(limit, 0) for limit in _TOKENS)}

    def refusal(self, needs: dict[QuotaLimit, int], now: int) -> AdmissionRefusal | None:
        """Return a refusal if ``needs`` exceed a quota, for the one with the longest wait; else None."""
        tenant = self.tenant
        if QuotaLimit.CONCURRENCY in needs and self._is_full(now):
            return AdmissionRefusal(
                limit=QuotaLimit.CONCURRENCY,
                fault=RefusalCause.QUOTA,
                of=self._name,
                value=tenant.concurrency,
                use=self.under_way,
                text=f"too many concurrent requests{self._shared_text}",
                retry_after=1,
            )
        if self._budget is not None:
            needs = self._with_budget(needs)
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
        if limit is QuotaLimit.MONEY:
            return self._costs_too_much(needs[limit], bucket.level(now))
        text = f"the request needs {needs[limit]}{self._shared_text}"
        if never:
            of_month = limit is QuotaLimit.BUDGET
            text += ", more than is left of the month" if of_month else ", more than the burst allows"
        return AdmissionRefusal(
            limit=limit,
            fault=RefusalCause.QUOTA,
            of=self._name,
            value=bucket.per_minute or bucket.burst,
            use=f"{bucket.level(now)} left of {bucket.burst}",
            text=text,
            retry_after=None if never else retry_pause(longest),
        )

    def _costs_too_much(self, cost: int, left: int) -> AdmissionRefusal:
        """Return the refusal of a request that costs more than is left of the tenant's budget in money."""
        budget, cost_text, left_text = (f"{each / MILLION:.6g}" for each in (self.tenant.money_per_month, cost, left))
        return AdmissionRefusal(
            limit=QuotaLimit.MONEY,
            fault=RefusalCause.QUOTA,
            of=self._name,
            value=budget,
            use=f"{left_text} left of {budget}",
            text=f"the request may cost {cost_text}{self._shared_text}, more than is left of the month",
        )

    def charge(self, needs: dict[QuotaLimit, int], now: int) -> None:
        """Charge a request for ``needs``."""
        if QuotaLimit.CONCURRENCY in needs:
            self.under_way += 1
            if self._places is not None:
                self._places.take(now)
        if self._budget is not None:
            needs = self._with_budget(needs)
        for limit, count in needs.items():
            if (bucket := self._buckets.get(limit)) is not None:
                bucket.take(count, now)

    def leave(self, needs: dict[QuotaLimit, int], now: int) -> None:
        """Release the concurrency of a request that was charged for ``needs`` and is over."""
        if QuotaLimit.CONCURRENCY in needs:
            self.under_way -= 1
            if self._places is not None:
                self._places.leave(now)

    def settle(self, limit: QuotaLimit, unused: int, now: int) -> None:
        """Refund ``unused`` charges; if negative, charge what was used in addition."""
        bucket = self._buckets.get(limit)
        if bucket is not None and unused > 0:
            bucket.give_back(unused, now)
        elif bucket is not None:
            bucket.take(-unused, now)
        if self._budget is not None and limit in _TOKENS:
            self.settle(QuotaLimit.BUDGET, unused, now)

    def _is_full(self, now: int) -> bool:
        if self._places is not None:
            return self._places.until(now) > 0
        return 0 < self.tenant.concurrency <= self.under_way

    @property
    def _shared_text(self) -> str:
        return "" if self._leases is None else self._leases.away_text

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


def _today() -> date:
    return datetime.now(UTC).date()


class Accounts:
    """Accounts of all tenants. Unknown callers share one, so there is at most one more than the policy has tenants."""

    def __init__(
        self, policy: AdmissionPolicy, leases: LeaseBook | None = None, today: Callable[[], date] = _today
    ) -> None:
        """``leases``: all servers share the quotas. ``today`` returns the day, in UTC, of whose prices money is."""
        self.policy = policy
        self._today = today
        self._leases = leases
        self._accounts: dict[str, Account] = {}

    def cost(self, model: str, prompt_tokens: int, answer_tokens: int) -> int:
        """Return what tokens of a model cost today, in millionths of the currency."""
        prices = self.policy.prices
        price = None if prices is None else prices.price(model, self._today())
        return 0 if price is None else price.millionths(prompt_tokens, answer_tokens)

    def of(self, tenant: str, now: int) -> Account:
        """Return the account of a tenant."""
        known = self.policy.tenant(tenant)
        account = self._accounts.get(known.name)
        if account is None:
            account = self._accounts[known.name] = Account(known, now, self._leases)
        return account

    def follow(self, policy: AdmissionPolicy, now: int) -> None:
        """Apply a new policy. Tenants that it no longer contains share the default account from now on."""
        self.policy = policy
        before = self._accounts
        self._accounts = {name: each for name, each in before.items() if policy.tenant(name).name == name}
        for name in before.keys() - self._accounts.keys():
            before[name].close()
        for name, account in self._accounts.items():
            account.change(policy.tenant(name), now)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())


_TOKENS: Final = (QuotaLimit.INPUT_RATE, QuotaLimit.OUTPUT_RATE)
"""Charges that count for the budget of a month."""


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
