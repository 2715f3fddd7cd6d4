"""Which instances may execute now, where executions need resources that there is only so much of. Pure.

A resource is a name and a number, as an operator thought of it: one that is global is there once, any other once on
each device. An instance asks for what it needs before it executes, and gives it back afterwards. Those that have to
wait stand in an order: few executions first, weighed by their priority. Nobody is overtaken by others that need what it
waits for, so that large needs are met, too; who needs nothing of that kind is not held up.

A resource is global for all models or for none. While a model is reloaded whose configuration has changed in that,
there are instances of both kinds: they do not execute at the same time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nerite.config.options import RateLimitResource
from nerite.core.errors import InvalidArgument

EVERYWHERE: Final = -1
"""As a device: all of them together, or each of them."""
_FIRST_EXECUTIONS: Final = 2
"""Triton counts the making of an instance and its warm-up, so that a priority weighs from the beginning on."""


class ResourcePool(NamedTuple):
    """A resource, on one device or on all together."""

    name: str
    device: int = EVERYWHERE

    @property
    def everywhere(self) -> bool:
        """It is global."""
        return self.device == EVERYWHERE


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """What one instance needs to execute, and what weight each of its executions has."""

    needs: tuple[tuple[ResourcePool, int], ...] = ()
    priority: int = 1


class RateLimitedInstance:
    """An instance that the limiter knows. For reading, but for ``granted``."""

    __slots__ = ("_executions", "claim", "granted", "holding", "model", "waiting")

    def __init__(self, model: str, claim: ResourceClaim, granted: Callable[[], None]) -> None:
        self.model = model
        self.claim = claim
        self.granted = granted
        """Called when it had to wait and has what it needs now. Must not come back to the limiter at once."""
        self.holding = False
        """It has its resources."""
        self.waiting: tuple[int, int] | None = None
        """Its place among those that wait."""
        self._executions = _FIRST_EXECUTIONS

    @property
    def score(self) -> int:
        """Who has less comes first."""
        return self._executions * max(self.claim.priority, 1)

    def count(self) -> None:
        """Note that it executes."""
        self._executions += 1


class RateLimiter:
    """One for all models of a server."""

    def __init__(self, limits: Iterable[RateLimitResource] = ()) -> None:
        """``limits`` tell of all there is. Without any, there is as much of each as whoever needs most of it needs."""
        self._limits: dict[str, dict[int, int]] = {}
        for name, amount, device in limits:
            self._limits.setdefault(name, {}).setdefault(device, amount)
        self._seats: dict[RateLimitedInstance, None] = {}
        """In the order in which they came."""
        self._taken: dict[ResourcePool, int] = {}
        self._amounts: dict[ResourcePool, int] = {}
        self._rivals: dict[ResourcePool, tuple[ResourcePool, ...]] = {}
        """What else has the name of a pool, and is global where it is not, or not where it is."""
        self._queue: list[tuple[tuple[int, int], RateLimitedInstance]] = []
        self._arrivals = itertools.count()

    def enter(
        self, model: str, claims: Sequence[ResourceClaim], granted: Callable[[], None]
    ) -> list[RateLimitedInstance]:
        """Have more instances of a model. Raises ``InvalidArgument`` if one of them could never execute."""
        self._check(model, claims)
        seats = [RateLimitedInstance(model, claim, granted) for claim in claims]
        self._seats.update(dict.fromkeys(seats))
        self._measure()
        return seats

    def leave(self, seat: RateLimitedInstance) -> None:
        """Forget an instance, whatever it does."""
        self._seats.pop(seat, None)
        self.release(seat)
        self._measure()

    def acquire(self, seat: RateLimitedInstance) -> bool:
        """Take what an instance needs; False if it has to wait until ``granted`` is called."""
        if seat.holding:
            return True
        if seat.waiting is None:
            self._line_up(seat)
            # Nothing came free: nobody else can have become able to go.
            self._admit()
        return seat.holding

    def release(self, seat: RateLimitedInstance, *, again: bool = False) -> None:
        """Give back what an instance has; or have it wait no more.

        ``again``: it wants it all once more, and gets it at once (``holding``) if it is first among those who wait.
        """
        if seat.holding:
            seat.holding = False
            for pool, count in seat.claim.needs:
                self._taken[pool] -= count
        elif seat.waiting is not None:
            self._queue.remove((seat.waiting, seat))
            seat.waiting = None
        else:
            return
        if again:
            self._line_up(seat)
        for admitted in self._admit():
            if admitted is not seat:
                admitted.granted()

    def _line_up(self, seat: RateLimitedInstance) -> None:
        seat.waiting = (seat.score, next(self._arrivals))
        bisect.insort(self._queue, (seat.waiting, seat), key=lambda entry: entry[0])

    def _admit(self) -> list[RateLimitedInstance]:
        """Give everyone in the queue what it needs, if that is there and nobody before it waits for some of it."""
        awaited: set[ResourcePool] = set()
        admitted, staying = [], []
        for entry in self._queue:
            _, seat = entry
            needs = seat.claim.needs
            if all(pool not in awaited and self._free(pool) >= count for pool, count in needs):
                for pool, count in needs:
                    self._taken[pool] = self._taken.get(pool, 0) + count
                seat.waiting, seat.holding = None, True
                admitted.append(seat)
            else:
                for pool, _ in needs:
                    awaited.update((pool, *self._rivals.get(pool, ())))
                staying.append(entry)
        self._queue = staying
        return admitted

    def _free(self, pool: ResourcePool) -> int:
        if self._rivals and any(map(self._taken.get, self._rivals.get(pool, ()))):
            return 0
        return self._amounts.get(pool, 0) - self._taken.get(pool, 0)

    def _measure(self) -> None:
        """Work out how much there is of everything, and let those go whom more of it helps."""
        most: dict[ResourcePool, int] = {}
        for seat in self._seats:
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
        """Return how much of a resource there is by the operator's word; None if there is no such word."""
        if not self._limits:
            return None
        amounts = self._limits.get(pool.name, {})
        if pool.everywhere:
            return max(amounts.values(), default=0)
        return amounts.get(pool.device, amounts.get(EVERYWHERE, 0))

    def _check(self, model: str, claims: Iterable[ResourceClaim]) -> None:
        # What a model said last counts: instances of before are on their way out.
        said = {(seat.model, pool.name): pool.everywhere for seat in self._seats for pool, _ in seat.claim.needs}
        there = {name: everywhere for (who, name), everywhere in said.items() if who != model}
        for pool, count in (need for claim in claims for need in claim.needs):
            if there.setdefault(pool.name, pool.everywhere) != pool.everywhere:
                raise InvalidArgument(
                    f'Resource "{pool.name}" is present as both global and device-specific resource in the model '
                    "configuration. Write global: true wherever it is named, in all models, or nowhere."
                )
            limit = self._limit(pool)
            if limit is not None and limit < count:
                raise InvalidArgument(
                    f'Resource count for "{pool.name}" is limited to {limit} which will prevent scheduling of one or '
                    f"more model instances, the minimum required count is {count}. Say so, as in "
                    f"--rate-limit-resource={pool.name}:{count}, or have the instance group need less."
                )
