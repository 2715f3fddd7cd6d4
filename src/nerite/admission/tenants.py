"""Admission control of a whole server: owns the accounts, and creates the admission queues.

Also exports the usage of tenants as JSON and as metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from weakref import WeakSet

from nerite.admission.accounts import Accounts, QuotaStanding, RateUse, TokenUse, UsageTable
from nerite.admission.controller import AdmissionController
from nerite.admission.idempotency import IdempotencyRegistry, IdempotentQueue
from nerite.admission.policy import ANY_MODEL, AdmissionPolicy, ModelLimits
from nerite.admission.queue import AdmissionQueue, EngineAdmissionQueue
from nerite.admission.shared_quotas import SharedQuotas
from nerite.core.request import EVERYBODY
from nerite.observability.exposition import Metric, MetricTable, Page

if TYPE_CHECKING:
    from nerite.core.queue_stage import QueueStage
    from nerite.observability.statistics import VersionStatistics
    from nerite.scheduling.load_shedding import LoadShedder


class UsageKey(NamedTuple):
    """Key of a usage table: a model and the unit of its sizes."""

    model: str
    tokens: bool
    """Sizes are counted in tokens; else in bytes."""


_COUNTS: Final = ("offered", "admitted", "withdrawn", "retries", "joined")
Usages: TypeAlias = Mapping[UsageKey, UsageTable]


def quota_json(
    standings: Iterable[QuotaStanding], controllers: Iterable[AdmissionController], usages: Usages
) -> dict[str, Any]:
    """Return quotas, load and usage as JSON."""
    return {
        "tenants": [asdict(each) for each in standings],
        "models": [
            {"model": name, "running": running, "waiting": waiting} for name, running, waiting in _busy(controllers)
        ],
        "use": [
            {"model": key.model, "tenant": tenant, "class": level, **_counts(key, use)}
            for key, tenant, level, use in _uses(usages)
        ],
    }


def _counts(key: UsageKey, use: TokenUse) -> dict[str, Any]:
    counts: dict[str, Any] = {name: getattr(use, name) for name in _COUNTS}
    counts |= {"refused": {str(limit): count for limit, count in use.refused.items()}, "finished": dict(use.finished)}
    if not key.tokens:
        return {**counts, "input_bytes": use.input_tokens}
    names = ("input_tokens", "output_tokens", "wasted_tokens")
    return {**counts, **{name: getattr(use, name) for name in names}, "finished_tokens": dict(use.finished_tokens)}


class _TenantUse(NamedTuple):
    use: TokenUse
    tokens: bool
    """Sizes are counted in tokens; else in bytes."""


class _ModelLoad(NamedTuple):
    running: int
    waiting: int


USE: Final = MetricTable[_TenantUse]((
    Metric("nerite_admission_offered", "counter", "Requests received", lambda u: u.use.offered),
    Metric("nerite_admission_joined", "counter",
           "Requests that shared the answer of an earlier one with the same key", lambda u: u.use.joined),
    Metric("nerite_admission_admitted", "counter", "Requests admitted", lambda u: u.use.admitted),
    Metric("nerite_admission_withdrawn", "counter",
           "Requests whose clients gave up while waiting for admission", lambda u: u.use.withdrawn),
    Metric("nerite_admission_retries", "counter",
           "Requests received that were marked as retries", lambda u: u.use.retries),
    Metric("nerite_admission_input_tokens", "counter",
           "Prompt tokens of requests admitted and not rejected later",
           lambda u: u.use.input_tokens if u.tokens else None),
    Metric("nerite_admission_output_tokens", "counter",
           "Tokens generated", lambda u: u.use.output_tokens if u.tokens else None),
    Metric("nerite_admission_wasted_tokens", "counter",
           "Tokens generated after the client had gone", lambda u: u.use.wasted_tokens if u.tokens else None),
    Metric("nerite_admission_input_bytes", "counter",
           "Bytes of requests admitted and not rejected later", lambda u: None if u.tokens else u.use.input_tokens),
    Metric("nerite_admission_refused", "counter",
           "Requests rejected, by limit",
           lambda u: {str(limit): count for limit, count in u.use.refused.items()}, "reason"),
    Metric("nerite_admission_finished", "counter",
           "Admitted requests that are over", lambda u: u.use.finished, "reason"),
), labels=("model", "tenant", "class"))  # fmt: skip

LOADS: Final = MetricTable[_ModelLoad]((
    Metric("nerite_admission_running", "gauge", "Admitted requests that are not over", lambda load: load.running),
    Metric("nerite_admission_waiting", "gauge", "Requests that wait for admission", lambda load: load.waiting),
), labels=("model",))  # fmt: skip

TENANTS: Final = MetricTable[QuotaStanding]((
    Metric("nerite_admission_under_way", "gauge",
           "Requests of a tenant that wait or run", lambda standing: standing.under_way),
), labels=("tenant",))  # fmt: skip

RATES: Final = MetricTable[RateUse]((
    Metric("nerite_admission_rate_left", "gauge",
           "Amount that a tenant may use at once now; negative if it owes some", lambda rate: rate.left),
), labels=("tenant", "limit"))  # fmt: skip


def _busy(controllers: Iterable[AdmissionController]) -> list[tuple[str, int, int]]:
    """Return the number of running and waiting requests of each model over all its versions."""
    found: dict[str, tuple[int, int]] = {}
    for controller in controllers:
        running, waiting = found.get(controller.model, (0, 0))
        found[controller.model] = running + controller.running, waiting + controller.waiting
    return [(name, *found[name]) for name in sorted(found)]


def _uses(usages: Usages) -> Iterator[tuple[UsageKey, str, str, TokenUse]]:
    for key in sorted(usages):
        for tenant, level, use in sorted(usages[key].items(), key=lambda item: item[:2]):
            yield key, tenant, level, use


_UNLIMITED: Final = AdmissionPolicy(llms={ANY_MODEL: ModelLimits(queue_length=0)})
"""Stands in for a missing policy: no limits here, because queues have their own bounds."""


class TenantAdmission:
    """Creates the admission queues of all models; one per server. Used from the loop's thread only."""

    def __init__(
        self, policy: AdmissionPolicy | None, loop: asyncio.AbstractEventLoop, *, routers: bool = False
    ) -> None:
        """Without a ``policy``, there is no admission control by tenant.

        ``routers``: some tell who sends requests, with or without a policy. Raises ``Unsupported``.
        """
        self.in_force = policy is not None
        """A policy is in force."""
        self.identifies = policy is not None or routers
        """Requests have callers."""
        self._routers = routers
        self.shared = None if policy is None or policy.shared is None else SharedQuotas(policy.shared, loop)
        """Quotas over all servers; its owner starts and closes it. None: this server has its own."""
        if self.shared is not None:
            self.shared.on_answer.append(self._offer_again)
        self._accounts = Accounts(policy or _UNLIMITED, None if self.shared is None else self.shared.book)
        self._loop = loop
        self._usages: dict[UsageKey, UsageTable] = {}
        """Usage by model for the lifetime of the server: counters survive a reload of the model."""
        self._admission_queues: WeakSet[AdmissionQueue] = WeakSet()
        self._controllers: WeakSet[AdmissionController] = WeakSet()
        self._idempotency = IdempotencyRegistry(self.policy.keeping, loop)

    @property
    def policy(self) -> AdmissionPolicy:
        """The policy in force."""
        return self._accounts.policy

    def sequence_share(self, tenant: str) -> float:
        """Return the fraction of a model's slots that the sequences of a tenant may hold now; all if it is alone."""
        policy = self.policy
        return policy.tenant(tenant).sequence_share if policy.tenants or self._routers else 1.0

    def admission_queue(
        self,
        model: str,
        following: QueueStage,
        statistics: VersionStatistics,
    ) -> AdmissionQueue:
        """Return the admission queue of a model version."""
        admission_queue = AdmissionQueue(self.controller(model, tokens=False), following, statistics, self._loop)
        self._admission_queues.add(admission_queue)
        return admission_queue

    def engine_admission_queue(
        self, model: str, following: QueueStage, statistics: VersionStatistics, load_shedder: LoadShedder
    ) -> EngineAdmissionQueue:
        """Return the admission queue of a model whose engine generates tokens: it admits as many as the engine can run.

        ``load_shedder`` bounds the queue if no policy is in force.
        """
        admission_queue = EngineAdmissionQueue(
            self.controller(model, tokens=True),
            following,
            statistics,
            self._loop,
            None if self.in_force else load_shedder,
        )
        self._admission_queues.add(admission_queue)
        return admission_queue

    def idempotent_queue(self, following: QueueStage, controller: AdmissionController) -> IdempotentQueue:
        """Return the stage for requests with an idempotency key; ``controller`` admits them in a following stage."""
        return IdempotentQueue(following, controller, self._idempotency)

    def controller(self, model: str, *, tokens: bool) -> AdmissionController:
        """Return a controller of a model, for an owner that has no admission queue. ``tokens``: it is an LLM."""
        usage = self._usages.setdefault(UsageKey(model, tokens), UsageTable())
        controller = AdmissionController(model, self._accounts, monotonic_ns(), tokens=tokens, usage=usage)
        self._controllers.add(controller)
        return controller

    def follow(self, policy: AdmissionPolicy) -> None:
        """Apply a new policy. Admitted requests stay admitted, and used quota stays used."""
        if self.shared is not None and policy.shared is not None:
            self.shared.follow(policy.shared)
        self._accounts.follow(policy, monotonic_ns())
        self._idempotency.follow(policy.keeping)
        for admission_queue in self._admission_queues:
            admission_queue.controller.follow()
            admission_queue.check_soon()

    def _offer_again(self) -> None:
        for admission_queue in self._admission_queues:
            admission_queue.offer_again()

    def stop(self) -> None:
        """Stop keeping answers for disconnected clients, because the server is shutting down."""
        self._idempotency.let_go()

    def quota(self) -> dict[str, Any]:
        """Return the usage and remaining quota of all tenants as JSON."""
        return quota_json(self._standings(), self._controllers, self._usages)

    def write_metrics(self, page: Page) -> None:
        """Write usage and remaining quota, if any model has admission control."""
        if not self._usages:
            return
        standings = self._standings()
        uses = _uses(self._usages)
        page.write(USE, [USE.row(_TenantUse(use, key.tokens), key.model, *who) for key, *who, use in uses])
        loads = _busy(self._controllers)
        page.write(LOADS, [LOADS.row(_ModelLoad(running, waiting), name) for name, running, waiting in loads])
        page.write(TENANTS, [TENANTS.row(each, each.tenant) for each in standings])
        page.write(RATES, [RATES.row(rate, each.tenant, rate.limit) for each in standings for rate in each.rates])
        if self.shared is not None:
            self.shared.write_metrics(page)

    def _standings(self) -> list[QuotaStanding]:
        now = monotonic_ns()
        names = [*self.policy.tenants, EVERYBODY] if self.in_force else []
        return [self._accounts.of(name, now).standing(now) for name in names]
