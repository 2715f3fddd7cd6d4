"""Requests that wait for a member, or for a copy of their model, instead of being refused at once.

``HoldQueue`` decides and has no clock: who is first, who has waited too long, and when a client that is refused may
try again. ``HeldRequests`` has the timers, and lets requests go on when their pool has changed.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Final, Protocol

from nerite.balancing.model_demand import ModelDemand
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.failures import report
from nerite.core.text import quoted_text
from nerite.observability.histogram import Histogram

_UNKNOWN_SECONDS: Final = 5
"""After which a client may try again if it is not known how long a wait takes."""
_MOST_WAITS: Final = 1024
"""Models of which is kept how long requests had to wait."""


class HoldingPool(Protocol):
    """What requests need of the pool for whose members they wait."""

    name: str
    held: int
    """Requests that wait."""
    holds: Counter[str]
    """Requests that have waited, by how that ended."""
    hold_seconds: Histogram
    model_demand: ModelDemand | None

    @property
    def most_held(self) -> int:
        """How many requests may wait."""

    @property
    def hold_timeout(self) -> float:
        """Seconds for which a request may wait."""

    def obstacle_to(self, model: str, now_ns: int) -> tuple[str, int]:
        """Return why no member has a model, as far as is known, and when a wait makes sense again (0: now)."""

    def hold_began(self, model: str) -> None:
        """Note that a request waits for a model."""


class WaitingRequest(Protocol):
    """A request that can wait."""

    def go_on(self) -> bool:
        """Choose a member again; return False if there is still none that can take the request."""

    def give_up(self, error: NeriteError) -> None:
        """Answer with an error: it is not worth to wait any longer."""


class HeldRequest:
    """The place of a request in the queue."""

    __slots__ = ("model", "number", "order", "pool", "request", "since_ns", "until_ns")

    def __init__(
        self, pool: HoldingPool, model: str, order: int, number: int, now_ns: int, request: WaitingRequest
    ) -> None:
        self.pool = pool
        self.model = model
        self.order = order
        """Of its class: the lowest goes first."""
        self.number = number
        self.since_ns = now_ns
        self.until_ns = now_ns + round(pool.hold_timeout * 1e9)
        self.request = request


class HoldQueue:
    """Requests that wait: for each pool and model by class, and first come first served within a class."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], dict[int, dict[int, HeldRequest]]] = {}
        """By pool and model, class and number. Dictionaries keep the order in which requests came."""
        self._pools: dict[str, dict[int, HeldRequest]] = {}
        """By pool and number: all requests of a pool wait equally long, so the first is the first to time out."""
        self._waits: dict[tuple[str, str], float] = {}
        """Seconds that the last wait for a model took."""
        self._number = 0

    def has(self, pool: str, model: str) -> bool:
        """Whether a request waits for a model in a pool."""
        return (pool, model) in self._queues

    @property
    def wanted(self) -> list[tuple[str, str]]:
        """Pools and models for which requests wait."""
        return list(self._queues)

    def counts(self, pool: str) -> Counter[str]:
        """Return how many requests wait for each model in a pool."""
        return Counter(held.model for held in self._pools.get(pool, {}).values())

    def add(self, pool: HoldingPool, model: str, order: int, now_ns: int, request: WaitingRequest) -> HeldRequest:
        """Put a request behind those of its class and the classes before it."""
        self._number += 1
        held = HeldRequest(pool, model, order, self._number, now_ns, request)
        self._queues.setdefault((pool.name, model), {}).setdefault(order, {})[held.number] = held
        self._pools.setdefault(pool.name, {})[held.number] = held
        return held

    def remove(self, held: HeldRequest, now_ns: int, *, served: bool) -> None:
        """Take a request out. ``served``: a member can take it, so that it is known how long the wait took."""
        key = held.pool.name, held.model
        orders = self._queues[key]
        queue = orders[held.order]
        del queue[held.number]
        if not queue:
            del orders[held.order]
        if not orders:
            del self._queues[key]
        in_pool = self._pools[held.pool.name]
        del in_pool[held.number]
        if not in_pool:
            del self._pools[held.pool.name]
        if served:
            self._waits.pop(key, None)
            self._waits[key] = (now_ns - held.since_ns) / 1e9
            if len(self._waits) > _MOST_WAITS:
                del self._waits[next(iter(self._waits))]

    def first(self, pool: str, model: str) -> HeldRequest | None:
        """Return the request that goes on first when a member of the pool can serve the model."""
        orders = self._queues.get((pool, model))
        return next(iter(orders[min(orders)].values())) if orders else None

    def waiting(self, pool: str = "", model: str = "") -> list[HeldRequest]:
        """Return the requests that wait; of a pool, or for a model only."""
        return [
            held
            for queue in self._pools.values()
            for held in queue.values()
            if pool in ("", held.pool.name) and model in ("", held.model)
        ]

    def expired(self, now_ns: int) -> list[HeldRequest]:
        """Return the requests that have waited for as long as they may."""
        return [held for queue in self._pools.values() for held in _expired(queue, now_ns)]

    def next_expiry(self) -> int | None:
        """Return when the next request has waited for too long."""
        return min((next(iter(queue.values())).until_ns for queue in self._pools.values()), default=None)

    def retry_after(self, pool: HoldingPool, model: str, now_ns: int) -> int:
        """Return the seconds after which a client may try again: when the wait for this model is likely to be over."""
        until_ns = pool.obstacle_to(model, now_ns)[1]
        if until_ns > now_ns:
            return math.ceil((until_ns - now_ns) / 1e9)
        usual = self._waits.get((pool.name, model))
        if usual is None:
            return _UNKNOWN_SECONDS
        first = self.first(pool.name, model)
        waited = (now_ns - first.since_ns) / 1e9 if first is not None else 0.0
        return max(math.ceil(usual - waited), 1)


def _expired(queue: dict[int, HeldRequest], now_ns: int) -> Iterator[HeldRequest]:
    for held in queue.values():
        if held.until_ns > now_ns:
            return
        yield held


class HeldRequests:
    """The requests of a router that wait for members. Each leaves exactly once."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.queue = HoldQueue()
        self.clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._scheduled = False
        self._closed: NeriteError | None = None

    def hold(self, pool: HoldingPool, model: str, order: int, request: WaitingRequest) -> HeldRequest | NeriteError:
        """Let a request wait, or return the error for its client: too many wait already, or waiting could not help."""
        now = self.clock()
        obstacle, until_ns = pool.obstacle_to(model, now)
        error: NeriteError | None = None
        if self._closed is not None:
            how, error = "stopped", self._closed
        elif until_ns > now:
            how, error = "in_vain", self._unavailable(pool, model, obstacle, now)
        elif pool.held >= pool.most_held:
            how = "full"
            text = f"{pool.held} requests wait for members already, as many as hold-requests allows"
            error = self._unavailable(pool, model, text, now)
        if error is not None:
            pool.holds[how] += 1
            if pool.model_demand is not None:
                pool.model_demand.refused(model, now)
            return error
        held = self.queue.add(pool, model, order, now, request)
        pool.held += 1
        if pool.model_demand is not None:
            pool.model_demand.begin(model, now)
        pool.hold_began(model)
        self._set_timer()
        return held

    def leave(self, held: HeldRequest, how: str) -> None:
        """Take a request out of the queue; ``how`` says for the metrics what becomes of it."""
        now = self.clock()
        self.queue.remove(held, now, served=how == "served")
        pool = held.pool
        pool.held -= 1
        pool.holds[how] += 1
        pool.hold_seconds.note((now - held.since_ns) / 1e9)
        if pool.model_demand is not None:
            pool.model_demand.end(held.model, now)

    def offer_soon(self) -> None:
        """Let requests go on in this turn of the loop, because members have changed or have room again."""
        if not self._scheduled and self.queue.wanted:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._offer)

    def _offer(self) -> None:
        self._scheduled = False
        for pool, model in self.queue.wanted:
            while (first := self.queue.first(pool, model)) is not None:
                try:
                    if not first.request.go_on():
                        break
                except Exception as error:  # else it would keep all that wait behind it
                    failure = report("router", error, f"while a request to model '{quoted_text(model)}' was to go on")
                    if self.queue.first(pool, model) is first:
                        self._give_up(first, "refused", failure)

    def fail(self, pool: HoldingPool, model: str) -> None:
        """Refuse the requests that wait for a model, because its obstacle will last."""
        now = self.clock()
        for held in self.queue.waiting(pool.name, model):
            error = self._unavailable(pool, model, pool.obstacle_to(model, now)[0], now)
            self._give_up(held, "in_vain", error)

    def stop(self, error: NeriteError) -> None:
        """Refuse all requests that wait, and all that would from now on."""
        self._closed = error
        for held in self.queue.waiting():
            self._give_up(held, "stopped", error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self.clock()
        for held in self.queue.expired(now):
            self._give_up(held, "timeout", self._expiry(held, now))
        self._set_timer()

    def _expiry(self, held: HeldRequest, now: int) -> NeriteError:
        """Return the error of a request that has waited for too long. Never raises: others, and the timer, follow."""
        pool = held.pool
        try:
            text = f"the request has waited for {pool.hold_timeout:g} s, the hold-timeout"
            if obstacle := pool.obstacle_to(held.model, now)[0]:
                text = f"{text}: {obstacle}"
            return self._unavailable(pool, held.model, text, now)
        except Exception as error:
            return report("router", error, f"while a request to model '{quoted_text(held.model)}' gave up its wait")

    def _give_up(self, held: HeldRequest, how: str, error: NeriteError) -> None:
        self.leave(held, how)
        try:
            held.request.give_up(error)
        except Exception as failure:  # the others that are given up, and the timer, do not depend on it
            report("router", failure, f"while a request to model '{quoted_text(held.model)}' was refused")

    def _unavailable(self, pool: HoldingPool, model: str, why: str, now_ns: int) -> Unavailable:
        return Unavailable(
            f"no member of pool '{pool.name}' can serve model '{quoted_text(model)}' now: {why}",
            self.queue.retry_after(pool, model, now_ns),
        )

    def _set_timer(self) -> None:
        """Have the timer ring when the next request has waited for too long."""
        next_ns = self.queue.next_expiry()
        if next_ns is None or (self._timer is not None and self._timer_ns <= next_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = next_ns
        seconds = max(next_ns - self.clock(), 0) / 1e9
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
