"""Where requests are let in, for all models of a server: the accounts of tenants, and the gates that charge them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from nerite.cache.gate import Queue
from nerite.core.request import InferenceRequest
from nerite.execution import quota
from nerite.execution.engine_turnstile import EngineTurnstile
from nerite.execution.keyed_queue import KeyedQueue
from nerite.execution.quota import UsageKey
from nerite.execution.rejoining import Rejoining
from nerite.execution.turnstile import Turnstile
from nerite.observability.exposition import Family
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.admission import Admission
from nerite.scheduling.tokens.account import Accounts, Standing
from nerite.scheduling.tokens.gate import Gate
from nerite.scheduling.tokens.policy import ANY_MODEL, EVERYBODY, ModelLimits, Policy
from nerite.scheduling.tokens.usage import Usage

_now = time.monotonic_ns


_NONE: Final = Policy(llms={ANY_MODEL: ModelLimits(queue_length=0)})
"""Of who may use what nothing is said: queues have their own bounds."""


class Reception:
    """One for the server. For the loop's thread only."""

    def __init__(self, policy: Policy | None, loop: asyncio.AbstractEventLoop) -> None:
        """Without a ``policy`` nobody has to be let in."""
        self.in_force = policy is not None
        """There is a policy, so that requests have callers."""
        self._accounts = Accounts(policy or _NONE)
        self._loop = loop
        self._usages: dict[UsageKey, Usage] = {}
        """By model, for as long as the server runs: what was used stays used when a model is loaded again."""
        self._turnstiles: WeakSet[Turnstile] = WeakSet()
        self._rejoining = Rejoining(self.policy.keeping, loop)

    @property
    def policy(self) -> Policy:
        """What is in force."""
        return self._accounts.policy

    def turnstile(
        self,
        model: str,
        queue: Queue,
        enter: Callable[[InferenceRequest], None],
        statistics: VersionStatistics,
    ) -> Turnstile | None:
        """Return what lets requests in to a version of a model; None where nobody has to be let in."""
        if not self.in_force:
            return None
        turnstile = Turnstile(self._gate(model, tokens=False), queue, enter, statistics, self._loop)
        self._turnstiles.add(turnstile)
        return turnstile

    def engine_turnstile(
        self, model: str, queue: Queue, statistics: VersionStatistics, admission: Admission
    ) -> EngineTurnstile:
        """Return the same of a model whose engine generates tokens: one lets in as many as the engine can do at once.

        ``admission`` bounds the queue where no policy does.
        """
        turnstile = EngineTurnstile(
            self._gate(model, tokens=True),
            queue,
            queue.submit,
            statistics,
            self._loop,
            None if self.in_force else admission,
        )
        self._turnstiles.add(turnstile)
        return turnstile

    def keyed(self, turnstile: EngineTurnstile) -> KeyedQueue:
        """Return what stands before that, for requests that have an idempotency key."""
        return KeyedQueue(turnstile, turnstile.gate, self._rejoining)

    def _gate(self, model: str, *, tokens: bool) -> Gate:
        usage = self._usages.setdefault(UsageKey(model, tokens), Usage())
        return Gate(model, self._accounts, _now(), tokens=tokens, usage=usage)

    def follow(self, policy: Policy) -> None:
        """Go on by another policy. Who was let in stays, and what was used stays used."""
        self._accounts.follow(policy, _now())
        self._rejoining.follow(policy.keeping)
        for turnstile in self._turnstiles:
            turnstile.gate.follow()
            turnstile.look_soon()

    def stop(self) -> None:
        """Keep no answers any more for clients that are gone: the server stops."""
        self._rejoining.let_go()

    def quota(self) -> dict[str, Any]:
        """Return what tenants have used, and what they have left, as JSON."""
        return quota.document(self._standings(), self._gates(), self._usages)

    def families(self) -> list[Family]:
        """Return the same as metrics; none where no model asks who is to be let in."""
        return quota.families(self._standings(), self._gates(), self._usages) if self._usages else []

    def _standings(self) -> list[Standing]:
        now = _now()
        names = [*self.policy.tenants, EVERYBODY] if self.in_force else []
        return [self._accounts.of(name, now).standing(now) for name in names]

    def _gates(self) -> list[Gate]:
        return [turnstile.gate for turnstile in self._turnstiles]
