"""Requests that wait until their model is loaded: bounded in number, by class, tenant and time; each ends exactly once.

Every process that serves connections has its own. What is waited for is told to whoever loads models, and
``LoadWaits`` is told when models have changed, and which loads have failed. For the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any, Final

from nerite.core.errors import Cancelled, DeadlineExceeded, NeriteError, NotLoaded, Overloaded, Unavailable
from nerite.core.failures import report
from nerite.core.request import Caller, InferenceRequest
from nerite.core.response import InferenceResponse

UNKNOWN_SECONDS: Final = 5
"""After which a client may try again while it is not known how long the load of a model takes."""

Claims = Mapping[str, int]
"""The tenants whose requests wait for a model, each with the class of its most important one."""
GoOn = Callable[[], None]
GiveUp = Callable[[NeriteError], None]


class HeldCall:
    """A request that waits for a model."""

    __slots__ = ("give_up", "go_on", "model", "number", "order", "tenant", "timer")

    def __init__(self, model: str, order: int, tenant: str, number: int, go_on: GoOn, give_up: GiveUp) -> None:
        self.model = model
        self.order = order
        """Of its class: the lowest goes first."""
        self.tenant = tenant
        self.number = number
        self.go_on = go_on
        self.give_up = give_up
        self.timer: asyncio.TimerHandle | None = None


class LoadWaits:
    """The requests of this process that wait for models."""

    def __init__(self, seconds: float, most: int, clock: Callable[[], int] = monotonic_ns) -> None:
        """A request waits for ``seconds`` at most, and ``most`` requests wait at the same time."""
        self.on_wanted: Callable[[str, Claims], None] = lambda model, claims: None
        """Told who waits for a model when a tenant, or a better class of one, is added; empty: nobody waits."""
        self.order_of: Callable[[Caller | None], int] = lambda caller: 0
        """Returns the class of a caller."""
        self.obstacle_to: Callable[[str], str] = lambda model: ""
        """Returns why a model is not loaded yet, as far as this process knows."""
        self.begun = 0
        """Requests that have waited, or still do."""
        self.refused = 0
        """Requests that were refused because too many waited, or that have waited for too long."""
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._held: dict[str, dict[int, HeldCall]] = {}
        self._count = 0
        self._number = 0
        self._closed: NeriteError | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def models(self) -> list[str]:
        """The models that requests wait for."""
        return list(self._held)

    def hold(
        self, absent: NotLoaded, caller: Caller | None, arrived_ns: int, go_on: GoOn, give_up: GiveUp
    ) -> HeldCall | None:
        """Let a request wait: ``go_on`` is called when its model is loaded, or ``give_up`` with the reason why not.

        Return None if ``give_up`` was called at once.
        """
        order, tenant = self.order_of(caller), "" if caller is None else caller.tenant
        if self._closed is not None:
            give_up(self._closed)
            return None
        if self._count >= self._most and not self._displace(order, tenant):
            self.refused += 1
            give_up(self._full(absent))
            return None
        self._number += 1
        held = HeldCall(absent.model, order, tenant, self._number, go_on, give_up)
        before = self._claims(absent.model).get(tenant)
        self._held.setdefault(absent.model, {})[held.number] = held
        self._count += 1
        self.begun += 1
        seconds, too_late = self._seconds, False
        if caller is not None and caller.patience_ns:
            left = (arrived_ns + caller.patience_ns - self._clock()) / 1e9
            if left < seconds:
                seconds, too_late = max(left, 0.0), True
        held.timer = asyncio.get_running_loop().call_later(seconds, self._expire, held, too_late)
        if before is None or order < before:
            self.on_wanted(absent.model, self._claims(absent.model))
        return held if held.number in self._held.get(absent.model, {}) else None

    def hold_request(self, absent: NotLoaded, request: InferenceRequest, go_on: GoOn) -> None:
        """Let an inference wait. It is answered if it cannot go on, or is cancelled."""

        def give_up(error: NeriteError) -> None:
            request.on_cancel = None
            request.respond(InferenceResponse.failed(error))

        def proceed() -> None:
            request.on_cancel = None
            go_on()

        def cancelled(_request: InferenceRequest) -> None:
            assert held is not None
            self.leave(held)
            request.respond(InferenceResponse.failed(Cancelled("Request cancelled")))

        held = self.hold(absent, request.header.caller, request.arrived_ns, proceed, give_up)
        if held is not None:
            request.on_cancel = cancelled

    async def until_loaded(self, absent: NotLoaded) -> None:
        """Return when a model is loaded. Raises ``NeriteError``. For calls that have a task of their own."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def give_up(error: NeriteError) -> None:
            if not done.done():
                done.set_exception(error)

        def go_on() -> None:
            if not done.done():
                done.set_result(None)

        held = self.hold(absent, None, 0, go_on, give_up)
        try:
            await done
        finally:
            if held is not None:
                self.leave(held)

    def leave(self, held: HeldCall) -> None:
        """Take a request out that no longer waits. Idempotent."""
        waiting = self._held.get(held.model, {})
        if waiting.pop(held.number, None) is None:
            return
        self._count -= 1
        if held.timer is not None:
            held.timer.cancel()
        if not waiting:
            del self._held[held.model]
            self.on_wanted(held.model, {})

    def offer(self, is_loaded: Callable[[str], bool]) -> None:
        """Let the requests go on whose models are loaded, those of the best class first."""
        for model in self.models:
            if is_loaded(model):
                for held in self._take(model):
                    self._call(held.go_on)

    def fail(self, model: str, error: NeriteError) -> None:
        """End the requests that wait for a model with an error."""
        for held in self._take(model):
            self._call(held.give_up, error)

    def stop(self, error: NeriteError) -> None:
        """End all requests that wait, and all that would from now on."""
        self._closed = error
        for model in self.models:
            self.fail(model, error)

    def _claims(self, model: str) -> dict[str, int]:
        claims: dict[str, int] = {}
        for held in self._held.get(model, {}).values():
            claims[held.tenant] = min(held.order, claims.get(held.tenant, held.order))
        return claims

    def _take(self, model: str) -> list[HeldCall]:
        waiting = sorted(self._held.get(model, {}).values(), key=lambda held: (held.order, held.number))
        for held in waiting:
            self.leave(held)
        return waiting

    def _displace(self, order: int, tenant: str) -> bool:
        """End a request of the least important class: the newest of the tenant that has most of them.

        It ends in favour of one of a better class, or of a tenant that has fewer requests waiting.
        """
        all_held = [held for waiting in self._held.values() for held in waiting.values()]
        count = Counter(held.tenant for held in all_held)
        last = max(all_held, key=lambda held: (held.order, count[held.tenant], held.number), default=None)
        if last is None or last.order < order:
            return False
        if last.order == order and count[last.tenant] <= count[tenant] + 1:
            return False
        self.leave(last)
        self.refused += 1
        others = "more important requests" if last.order > order else "requests, most of them of this client,"
        why = f"model '{last.model}' is not loaded, and {self._most} {others} wait for models"
        self._call(last.give_up, Overloaded(why, UNKNOWN_SECONDS))
        return True

    def _full(self, absent: NotLoaded) -> NeriteError:
        return Overloaded(
            f"model '{absent.model}' is not loaded, and {self._count} requests wait for models already, as many as "
            "--demand-max-waiting allows",
            absent.retry_after,
        )

    def _expire(self, held: HeldCall, too_late: bool) -> None:
        self.leave(held)
        self.refused += 1
        why = self.obstacle_to(held.model) or "its load has not ended"
        if too_late:
            self._call(
                held.give_up, DeadlineExceeded(f"model '{held.model}' was not loaded before the deadline: {why}")
            )
            return
        text = f"model '{held.model}' was not loaded within {self._seconds:g} s (--demand-wait-seconds): {why}"
        self._call(held.give_up, Unavailable(text, UNKNOWN_SECONDS))

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            report("admission", error, "of a request that has waited for its model")


def retry_seconds(load_seconds: float) -> int:
    """Return the ``Retry-After`` for a model whose load is known to take ``load_seconds``; 0: not known."""
    return max(math.ceil(load_seconds), 1) if load_seconds > 0 else UNKNOWN_SECONDS
