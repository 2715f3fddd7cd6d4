"""Where requests are let in, for all models of a server: the accounts of tenants, and the gates that charge them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakSet

from nerite.admission.accounts import Accounts, QuotaStanding, TokenUse, UsageTable
from nerite.admission.controller import AdmissionController
from nerite.admission.idempotency import IdempotencyRegistry, IdempotentQueue
from nerite.admission.policy import ANY_MODEL, EVERYBODY, AdmissionPolicy, ModelLimits, parse_policy
from nerite.admission.queue import AdmissionQueue, EngineAdmissionQueue
from nerite.cache.frontend import RequestQueueInterface
from nerite.config.watched_file import WatchedFile, read_content
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest
from nerite.observability.exposition import MetricFamily, Sample, joined, labels
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.load_shedding import LoadShedder

# The policy that is in force: read from a file that may change while the server runs.

_MAX_SIZE: Final = 4 * 1024 * 1024


class PolicyChange(NamedTuple):
    """What a look at the file found: a text, or a problem."""

    text: str
    problem: str = ""
    """Why there is no text."""


class WatchedPolicy(WatchedFile[PolicyChange]):
    """Of one file, as of the last time that it was in order."""

    def __init__(self, path: str, found: PolicyChange) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` with all that is wrong with it."""
        super().__init__(path, found)
        self.policy = _parsed(path, found)

    def _take(self, found: PolicyChange) -> None:
        try:
            self.policy = _parsed(self.path, found)
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message

    def look(self) -> PolicyChange:
        """Look at the file. Blocks as files do."""
        return check_policy(self.path)

    def news(self) -> str:
        """Return what to say in the log after a change."""
        if self.problem:
            return f"{self.problem}\nThe policy stays as it was: correct '{self.path}', which is looked at all the time"
        return f"the policy file '{self.path}' was read: it is in force"


def check_policy(path: str) -> PolicyChange:
    """Look at a file. Blocks as files do."""
    content = read_content(path, _MAX_SIZE)
    if content.problem:
        return PolicyChange("", content.problem)
    # It was perhaps cut to be written anew: no reason to lift every limit.
    if not content.data.strip():
        return PolicyChange("", "is empty")
    try:
        return PolicyChange(content.data.decode())
    except UnicodeDecodeError as error:
        return PolicyChange("", f"is no UTF-8: {error}")


def open_policy(path: str) -> WatchedPolicy:
    """Return the policy in a file. Raises ``InvalidArgument`` with all that is wrong with it."""
    return WatchedPolicy(path, check_policy(path))


def _parsed(path: str, found: PolicyChange) -> AdmissionPolicy:
    if found.problem:
        raise InvalidArgument(f"the policy file '{path}' {found.problem}")
    return parse_policy(found.text, path)


# What tenants have used and what they have left: as JSON, and as metrics.


class UsageKey(NamedTuple):
    """What is counted together."""

    model: str
    tokens: bool
    """Sizes are tokens; else they are bytes."""


_COUNTS: Final = ("offered", "admitted", "withdrawn", "retries", "joined")
Usages: TypeAlias = Mapping[UsageKey, UsageTable]


def quota_json(
    standings: Iterable[QuotaStanding], gates: Iterable[AdmissionController], usages: Usages
) -> dict[str, Any]:
    """Return everything as JSON."""
    return {
        "tenants": [asdict(each) for each in standings],
        "models": [{"model": name, "running": running, "waiting": waiting} for name, running, waiting in _busy(gates)],
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


_COUNTERS: Final[tuple[tuple[str, str, Callable[[TokenUse], int]], ...]] = (
    ("offered", "Requests that came", lambda use: use.offered),
    ("joined", "Requests that got the answer of an earlier one with the same key", lambda use: use.joined),
    ("admitted", "Requests that were let in", lambda use: use.admitted),
    ("withdrawn", "Requests whose clients gave up while they waited to be let in", lambda use: use.withdrawn),
    ("retries", "Requests that came and said that they were asked before", lambda use: use.retries),
)
_TOKENS: Final[tuple[tuple[str, str, Callable[[TokenUse], int]], ...]] = (
    ("input_tokens", "Tokens of the prompts that were let in and not refused after all", lambda use: use.input_tokens),
    ("output_tokens", "Tokens that were generated", lambda use: use.output_tokens),
    ("wasted_tokens", "Tokens that were generated when the client had gone", lambda use: use.wasted_tokens),
)


def quota_families(
    standings: Sequence[QuotaStanding], gates: Iterable[AdmissionController], usages: Usages
) -> list[MetricFamily]:
    """Return everything as metrics."""
    busy = _busy(gates)
    uses = [
        (labels({"model": key.model, "tenant": tenant, "class": level}), key, use)
        for key, tenant, level, use in _uses(usages)
    ]
    tokens = [(of, use) for of, key, use in uses if key.tokens]
    rates = [(labels({"tenant": each.tenant, "limit": rate.limit}), rate) for each in standings for rate in each.rates]
    return [
        *(_counter(name, text, [(of, read(use)) for of, _, use in uses]) for name, text, read in _COUNTERS),
        *(_counter(name, text, [(of, read(use)) for of, use in tokens]) for name, text, read in _TOKENS),
        _counter(
            "input_bytes",
            "Bytes of the requests that were let in and not refused after all",
            [(of, use.input_tokens) for of, key, use in uses if not key.tokens],
        ),
        _counter(
            "refused",
            "Requests that were refused, by limit",
            [
                (joined(of, labels({"reason": limit})), count)
                for of, _, use in uses
                for limit, count in use.refused.items()
            ],
        ),
        _counter(
            "finished",
            "Requests that were let in and are over",
            [
                (joined(of, labels({"reason": why})), count)
                for of, _, use in uses
                for why, count in use.finished.items()
            ],
        ),
        _gauge("running", "Requests that are let in", [(labels({"model": name}), count) for name, count, _ in busy]),
        _gauge(
            "waiting", "Requests that wait to be let in", [(labels({"model": name}), count) for name, _, count in busy]
        ),
        _gauge(
            "under_way",
            "Requests of a tenant",
            [(labels({"tenant": each.tenant}), each.under_way) for each in standings],
        ),
        _gauge(
            "rate_left",
            "What a tenant may use at once now; below 0: what is owed",
            [(of, rate.left) for of, rate in rates],
        ),
    ]


def _counter(name: str, text: str, samples: Iterable[Sample]) -> MetricFamily:
    return MetricFamily(f"nerite_admission_{name}", text, "counter", list(samples))


def _gauge(name: str, text: str, samples: Iterable[Sample]) -> MetricFamily:
    return MetricFamily(f"nerite_admission_{name}", text, "gauge", list(samples))


def _busy(gates: Iterable[AdmissionController]) -> list[tuple[str, int, int]]:
    """Return how many requests run and wait of each model, all its versions together."""
    found: dict[str, tuple[int, int]] = {}
    for gate in gates:
        running, waiting = found.get(gate.model, (0, 0))
        found[gate.model] = running + gate.running, waiting + gate.waiting
    return [(name, *found[name]) for name in sorted(found)]


def _uses(usages: Usages) -> Iterator[tuple[UsageKey, str, str, TokenUse]]:
    for key in sorted(usages):
        for tenant, level, use in sorted(usages[key].items(), key=lambda item: item[:2]):
            yield key, tenant, level, use


_now = time.monotonic_ns


_NONE: Final = AdmissionPolicy(llms={ANY_MODEL: ModelLimits(queue_length=0)})
"""Of who may use what nothing is said: queues have their own bounds."""


class TenantAdmission:
    """One for the server. For the loop's thread only."""

    def __init__(self, policy: AdmissionPolicy | None, loop: asyncio.AbstractEventLoop) -> None:
        """Without a ``policy`` nobody has to be let in."""
        self.in_force = policy is not None
        """There is a policy, so that requests have callers."""
        self._accounts = Accounts(policy or _NONE)
        self._loop = loop
        self._usages: dict[UsageKey, UsageTable] = {}
        """By model, for as long as the server runs: what was used stays used when a model is loaded again."""
        self._turnstiles: WeakSet[AdmissionQueue] = WeakSet()
        self._idempotency = IdempotencyRegistry(self.policy.keeping, loop)

    @property
    def policy(self) -> AdmissionPolicy:
        """What is in force."""
        return self._accounts.policy

    def admission_queue(
        self,
        model: str,
        queue: RequestQueueInterface,
        enter: Callable[[InferenceRequest], None],
        statistics: VersionStatistics,
    ) -> AdmissionQueue | None:
        """Return what lets requests in to a version of a model; None where nobody has to be let in."""
        if not self.in_force:
            return None
        admission_queue = AdmissionQueue(self._gate(model, tokens=False), queue, enter, statistics, self._loop)
        self._turnstiles.add(admission_queue)
        return admission_queue

    def engine_admission_queue(
        self, model: str, queue: RequestQueueInterface, statistics: VersionStatistics, admission: LoadShedder
    ) -> EngineAdmissionQueue:
        """Return the same of a model whose engine generates tokens: one lets in as many as the engine can do at once.

        ``admission`` bounds the queue where no policy does.
        """
        admission_queue = EngineAdmissionQueue(
            self._gate(model, tokens=True),
            queue,
            queue.submit,
            statistics,
            self._loop,
            None if self.in_force else admission,
        )
        self._turnstiles.add(admission_queue)
        return admission_queue

    def keyed(self, admission_queue: EngineAdmissionQueue) -> IdempotentQueue:
        """Return what stands before that, for requests that have an idempotency key."""
        return IdempotentQueue(admission_queue, admission_queue.gate, self._idempotency)

    def _gate(self, model: str, *, tokens: bool) -> AdmissionController:
        usage = self._usages.setdefault(UsageKey(model, tokens), UsageTable())
        return AdmissionController(model, self._accounts, _now(), tokens=tokens, usage=usage)

    def follow(self, policy: AdmissionPolicy) -> None:
        """Go on by another policy. Who was let in stays, and what was used stays used."""
        self._accounts.follow(policy, _now())
        self._idempotency.follow(policy.keeping)
        for admission_queue in self._turnstiles:
            admission_queue.gate.follow()
            admission_queue.look_soon()

    def stop(self) -> None:
        """Keep no answers any more for clients that are gone: the server stops."""
        self._idempotency.let_go()

    def quota(self) -> dict[str, Any]:
        """Return what tenants have used, and what they have left, as JSON."""
        return quota_json(self._standings(), self._gates(), self._usages)

    def families(self) -> list[MetricFamily]:
        """Return the same as metrics; none where no model asks who is to be let in."""
        return quota_families(self._standings(), self._gates(), self._usages) if self._usages else []

    def _standings(self) -> list[QuotaStanding]:
        now = _now()
        names = [*self.policy.tenants, EVERYBODY] if self.in_force else []
        return [self._accounts.of(name, now).standing(now) for name in names]

    def _gates(self) -> list[AdmissionController]:
        return [admission_queue.gate for admission_queue in self._turnstiles]
