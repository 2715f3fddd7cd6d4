"""Rate limiter: a pure decider that grants instances the limited resources that they need to execute.

A resource is a name and an amount defined by the operator; a global one exists once, any other once per device. An
instance acquires its resources before an execution and releases them afterwards. Waiting instances are ordered by their
number of executions weighted by priority, fewest first. An instance is not overtaken by others that need a resource it
waits for, so that large claims do not starve; instances that need none of these resources are not blocked.

A resource is global for all models or for none. While a model whose configuration changes this is reloaded, instances
of both kinds exist; they do not execute at the same time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nerite.config.flag import RateLimitResource
from nerite.core.errors import InvalidArgument

EVERYWHERE: Final = -1
"""Pseudo device id: all devices together, or each of them."""
_FIRST_EXECUTIONS: Final = 2
"""Initial count. Like Triton, count the creation and the warm-up of an instance, so that priority matters at once."""


class ResourcePool(NamedTuple):
    """A resource on one device, or a global one."""

    name: str
    device: int = EVERYWHERE

    @property
    def everywhere(self) -> bool:
        """Whether the resource is global."""
        return self.device == EVERYWHERE


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """Resources that one instance needs to execute, and the weight of each of its executions."""

    needs: tuple[tuple[ResourcePool, int], ...] = ()
    priority: int = 1


class RateLimitedInstance:
    """Instance registered with the limiter. Read-only except for ``granted``."""

    __slots__ = ("_executions", "claim", "granted", "holding", "model", "waiting")

    def __init__(self, model: str, claim: ResourceClaim, granted: Callable[[], None]) -> None:
        self.model = model
        self.claim = claim
        self.granted = granted
        """Called when it had to wait and now holds its resources. Must not call the limiter synchronously."""
        self.holding = False
        """It holds its resources."""
        self.waiting: tuple[int, int] | None = None
        """Its sort key in the queue; None while it does not wait."""
        self._executions = _FIRST_EXECUTIONS

    @property
    def score(self) -> int:
        """Executions weighted by priority; the lowest score is served first."""
        return self._executions * max(self.claim.priority, 1)

    def count(self) -> None:
        """Count an execution."""
        self._executions += 1


class RateLimiter:
    """Grants resources to the instances of all models of a server."""

    def __init__(self, limits: Iterable[RateLimitResource] = ()) -> None:
        """``limits`` define all resources. Without any, each resource has the largest amount that an instance needs."""
        self._limits: dict[str, dict[int, int]] = {}
        for name, amount, device in limits:
            self._limits.setdefault(name, {}).setdefault(device, amount)
        self.seats: dict[RateLimitedInstance, None] = {}
        """Registered instances in order of registration."""
        self.taken: dict[ResourcePool, int] = {}
        self._amounts: dict[ResourcePool, int] = {}
        self._rivals: dict[ResourcePool, tuple[ResourcePool, ...]] = {}
        """Pools with the same name that are global if the key is not, and vice versa."""
        self.queue: list[tuple[tuple[int, int], RateLimitedInstance]] = []
        self._arrivals = itertools.count()

    def enter(
        self, model: str, claims: Sequence[ResourceClaim], granted: Callable[[], None]
    ) -> list[RateLimitedInstance]:
        """Register instances of a model. Raises ``InvalidArgument`` if one of them could never execute."""
        self._check(model, claims)
        seats = [RateLimitedInstance(model, claim, granted) for claim in claims]
        self.seats.update(dict.fromkeys(seats))
        self._measure()
        return seats

    def leave(self, seat: RateLimitedInstance) -> None:
        """Unregister an instance in any state, and release its resources."""
        self.seats.pop(seat, None)
        self.release(seat)
        self._measure()

    def acquire(self, seat: RateLimitedInstance) -> bool:
        """Acquire an instance's resources; return False if it has to wait until ``granted`` is called."""
        if seat.holding:
            return True
        if seat.waiting is None:
            self._enqueue(seat)
            # No resource was released, so no other instance can be admitted by this.
            self._admit()
        return seat.holding

    def release(self, seat: RateLimitedInstance, *, again: bool = False) -> None:
        """Release an instance's resources, or stop it from waiting.

        ``again``: it needs them again, and gets them at once (``holding``) if it is first in the queue.
        """
        if seat.holding:
            seat.holding = False
            for pool, count in seat.claim.needs:
                self.taken[pool] -= count
        elif seat.waiting is not None:
            self.queue.remove((seat.waiting, seat))
            seat.waiting = None
        else:
            return
        if again:
            self._enqueue(seat)
        for admitted in self._admit():
            if admitted is not seat:
                admitted.granted()

    def _enqueue(self, seat: RateLimitedInstance) -> None:
        seat.waiting = (seat.score, next(self._arrivals))
        bisect.insort(self.queue, (seat.waiting, seat), key=lambda entry: entry[0])

    def _admit(self) -> list[RateLimitedInstance]:
        """Grant resources in queue order to all instances that overtake none that waits for the same resource."""
        awaited: set[ResourcePool] = set()
        admitted, staying = [], []
        for entry in self.queue:
            _, seat = entry
            needs = seat.claim.needs
            if all(pool not in awaited and self._free(pool) >= count for pool, count in needs):
                for pool, count in needs:
                    self.taken[pool] = self.taken.get(pool, 0) + count
                seat.waiting, seat.holding = None, True
                admitted.append(seat)
            else:
                for pool, _ in needs:
                    awaited.update((pool, *self._rivals.get(pool, ())))
                staying.append(entry)
        self.queue = staying
        return admitted

    def _free(self, pool: ResourcePool) -> int:
        if self._rivals and any(map(self.taken.get, self._rivals.get(pool, ()))):
            return 0
        return self._amounts.get(pool, 0) - self.taken.get(pool, 0)

    def _measure(self) -> None:
        """Recompute the amounts of all resources, and grant to instances that larger amounts unblock."""
        most: dict[ResourcePool, int] = {}
        for seat in self.seats:
            for pool, count in seat.claim.needs:
                most[pool] = max(count, most.get(pool, 0))
        self._amounts = {pool: count if (limit := self._limit(pool)) is None else limit for pool, count in most.items()}
        self._rivals = {
            pool: rivals
            for pool in most
            if (rivals := tuple(each for each in most if each.name == pool.name and each.everywhere != pool.everywhere))
        }
        for seat in self._admit():
            seat.granted()

    def _limit(self, pool: ResourcePool) -> int | None:
        """Return the configured amount of a resource; None if no limits are configured."""
        if not self._limits:
            return None
        amounts = self._limits.get(pool.name, {})
        if pool.everywhere:
            return max(amounts.values(), default=0)
        return amounts.get(pool.device, amounts.get(EVERYWHERE, 0))

    def _check(self, model: str, claims: Iterable[ResourceClaim]) -> None:
        # Only a model's latest configuration counts: its earlier instances are about to be removed.
        declared = {(seat.model, pool.name): pool.everywhere for seat in self.seats for pool, _ in seat.claim.needs}
        there = {name: everywhere for (who, name), everywhere in declared.items() if who != model}
        for pool, count in (need for claim in claims for need in claim.needs):
            if there.setdefault(pool.name, pool.everywhere) != pool.everywhere:
                raise InvalidArgument(
                    f'Resource "{pool.name}" is present as both global and device-specific resource in the model '
                    "configuration. Set global: true in all instance groups of all models that name it, or in none."
                )
            limit = self._limit(pool)
            if limit is not None and limit < count:
                raise InvalidArgument(
                    f'Resource count for "{pool.name}" is limited to {limit} which will prevent scheduling of one or '
                    f"more model instances, the minimum required count is {count}. Raise the limit "
                    f"with --rate-limit-resource={pool.name}:{count}, or reduce the count in the instance group."
                )
