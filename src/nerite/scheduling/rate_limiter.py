"""Which instances may execute now, where executions need resources that there is only so much of. Pure.

A resource is a name and a number, as an operator thought of it: one that is global is there once, any other once on
each device. An instance asks for what it needs before it executes, and gives it back afterwards. Those that have to
wait stand in an order: few executions first, weighed by their priority. Nobody is overtaken by others that need what it
waits for, so that large needs are met, too; who needs nothing of that kind is not held up.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from nerite.config.options import RateLimitResource
from nerite.core.errors import InvalidArgument

EVERYWHERE: Final = -1
"""As a device: all of them together, or each of them."""
_FIRST_EXECUTIONS: Final = 2
"""Triton counts the making of an instance and its warm-up, so that a priority weighs from the beginning on."""


class Pool(NamedTuple):
    """A resource, on one device or on all together."""

    name: str
    device: int = EVERYWHERE


@dataclass(frozen=True, slots=True)
class Claim:
    """What one instance needs to execute, and what weight each of its executions has."""

    needs: tuple[tuple[Pool, int], ...] = ()
    priority: int = 1


class Seat:
    """An instance that the limiter knows. For reading, but for ``granted``."""

    __slots__ = ("_executions", "claim", "granted", "holding", "waiting")

    def __init__(self, claim: Claim, granted: Callable[[], None]) -> None:
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
        self._seats: set[Seat] = set()
        self._taken: dict[Pool, int] = {}
        self._amounts: dict[Pool, int] = {}
        self._queue: list[tuple[tuple[int, int], Seat]] = []
        self._arrivals = itertools.count()

    def enter(self, claim: Claim, granted: Callable[[], None]) -> Seat:
        """Have one more instance. Raises ``InvalidArgument`` if it could never execute."""
        self._check(claim)
        seat = Seat(claim, granted)
        self._seats.add(seat)
        self._measure()
        return seat

    def leave(self, seat: Seat) -> None:
        """Forget an instance, whatever it does."""
        self._seats.discard(seat)
        self.release(seat)
        self._measure()

    def acquire(self, seat: Seat) -> bool:
        """Take what an instance needs; False if it has to wait until ``granted`` is called."""
        if seat.holding:
            return True
        if seat.waiting is None:
            self._line_up(seat)
            # Nothing came free: nobody else can have become able to go.
            self._admit()
        return seat.holding

    def release(self, seat: Seat, *, again: bool = False) -> None:
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

    def _line_up(self, seat: Seat) -> None:
        seat.waiting = (seat.score, next(self._arrivals))
        bisect.insort(self._queue, (seat.waiting, seat), key=lambda entry: entry[0])

    def _admit(self) -> list[Seat]:
        """Give everyone in the queue what it needs, if that is there and nobody before it waits for some of it."""
        awaited: set[Pool] = set()
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
                awaited.update(pool for pool, _ in needs)
                staying.append(entry)
        self._queue = staying
        return admitted

    def _free(self, pool: Pool) -> int:
        return self._amounts.get(pool, 0) - self._taken.get(pool, 0)

    def _measure(self) -> None:
        """Work out how much there is of everything, and let those go whom more of it helps."""
        most: dict[Pool, int] = {}
        for seat in self._seats:
            for pool, count in seat.claim.needs:
                most[pool] = max(count, most.get(pool, 0))
        self._amounts = {pool: count if (limit := self._limit(pool)) is None else limit for pool, count in most.items()}
        for seat in self._admit():
            seat.granted()

    def _limit(self, pool: Pool) -> int | None:
        """Return how much of a resource there is by the operator's word; None if there is no such word."""
        if not self._limits:
            return None
        amounts = self._limits.get(pool.name, {})
        if pool.device == EVERYWHERE:
            return max(amounts.values(), default=0)
        return amounts.get(pool.device, amounts.get(EVERYWHERE, 0))

    def _check(self, claim: Claim) -> None:
        there = {pool.name: pool.device == EVERYWHERE for seat in self._seats for pool, _ in seat.claim.needs}
        for pool, count in claim.needs:
            everywhere = pool.device == EVERYWHERE
            if there.setdefault(pool.name, everywhere) != everywhere:
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
