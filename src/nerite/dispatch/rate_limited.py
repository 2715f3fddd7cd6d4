"""The roster of a model whose executions are limited: an instance also needs resources before it begins a batch.

The batch is put together when the resources are there, not before. So requests that wait for resources wait in the
queue, where they may join a batch, overtake, expire and be withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch.interface import Ended, Refusal, SelectivePicker
from nerite.instances.instance import Batch, ModelInstance
from nerite.instances.placement import InstancePlan
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.rate_limiter import RateLimitedInstance, RateLimiter

# What the instances of a model need of the server's resources: asked for, used, given back (``--rate-limit``).


class InstanceResources:
    """One for a model version: the seats of its instances at the limiter, which is the server's."""

    def __init__(self, limiter: RateLimiter, model: str) -> None:
        self.granted: Callable[[], None] = lambda: None
        """Called when an instance that waited may execute; in no turn of its own."""
        self._limiter = limiter
        self._model = model
        self._seats: dict[ModelInstance, RateLimitedInstance] = {}

    def enter(self, plans: Sequence[InstancePlan]) -> list[RateLimitedInstance | None]:
        """Have seats for new instances, none for passive ones. Raises ``InvalidArgument``; none is left then."""
        claims = [plan.claim for plan in plans if not plan.passive]
        seats = iter(self._limiter.enter(self._model, claims, self._granted))
        return [None if plan.passive else next(seats) for plan in plans]

    def give_up(self, seats: Sequence[RateLimitedInstance | None]) -> None:
        """Take back ``enter``."""
        for seat in seats:
            if seat is not None:
                self._limiter.leave(seat)

    def seat(self, runner: ModelInstance, seat: RateLimitedInstance) -> None:
        """Note whose seat it is."""
        self._seats[runner] = seat

    def acquire(self, runner: ModelInstance) -> bool:
        """Return whether an instance may execute now. If not, ``granted`` is called later."""
        return self._limiter.acquire(self._seats[runner])

    def granted_to(self, runner: ModelInstance) -> bool:
        """Return whether an instance has what it asked for."""
        return self._seats[runner].holding

    def executes(self, runner: ModelInstance) -> None:
        """Count an execution."""
        self._seats[runner].count()

    def release(self, runner: ModelInstance, *, again: bool = False) -> None:
        """Let others have what an instance had or waited for, unless it has left; ``again``: it wants it once more."""
        seat = self._seats.get(runner)
        if seat is not None:
            self._limiter.release(seat, again=again)

    def leave(self, runner: ModelInstance) -> None:
        """Forget an instance that will not execute any more."""
        self._limiter.leave(self._seats.pop(runner))

    def close(self) -> None:
        """Forget all that are left."""
        for runner in tuple(self._seats):
            self.leave(runner)

    def _granted(self) -> None:
        self.granted()


class RateLimitedPicker:
    """Another roster, which decides, and what its instances may have. Nothing lines up behind one that runs."""

    ahead = False

    def __init__(self, roster: SelectivePicker, rations: InstanceResources) -> None:
        self._roster = roster
        self._rations = rations
        self.timed = roster.timed
        self.settles = roster.settles
        self._running: set[ModelInstance] = set()
        self._retired: set[ModelInstance] = set()
        self._waiting: set[ModelInstance] = set()
        """Those that could begin a batch, if they had what they need."""

    @property
    def idle(self) -> Collection[ModelInstance]:
        """The instances that are up and run nothing."""
        return self._roster.idle

    @property
    def size(self) -> int:
        """Requests that wait."""
        return self._roster.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""
        return self._roster.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """How many batches began for which reason."""
        return self._roster.releases

    def renewed(self) -> RateLimitedPicker:
        """Return an empty one with the same rules. An instance that runs keeps what it has until it has finished."""
        return RateLimitedPicker(self._roster.renewed(), self._rations)

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch in which one request of ``batch`` runs without the others."""
        return self._roster.alone(batch, index)

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""
        return self._roster.offer(request, now)

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return who is refused because too many wait."""
        return self._roster.give_way(request)

    def choose(self, now: int) -> tuple[ModelInstance, Batch] | None:
        """Return an instance that has what it needs, and its batch; None if nothing should start."""
        while True:
            self._waiting.clear()
            chosen = self._roster.choose(now, self._may_begin)
            if chosen is not None:
                self._rations.executes(chosen[0])
                self._running.add(chosen[0])
                return chosen
            self._stand_back()
            # What one of our instances stands back from may be what another one waits for.
            if not any(map(self._rations.granted_to, self._waiting)):
                return None

    def ended(
        self, runner: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Note that ``runner`` has finished a batch, and have it give back what it had."""
        self._running.discard(runner)
        ended = self._roster.ended(runner, batch, responses, took_ns)
        self._rations.release(runner, again=self._roster.size > 0 and runner in self._roster.idle)
        return ended

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Take note of one of several responses to a request; return what its caller gets of it."""
        return self._roster.settle(request, response)

    def came(self, runner: ModelInstance) -> None:
        """Note that ``runner`` is there, up and idle: what it had before it gives back."""
        self._rations.release(runner)
        self._roster.came(runner)

    def gone(self, runner: ModelInstance) -> Sequence[Refusal]:
        """Note that ``runner`` went down or left. What it has it gives back now, or when its batch has ended."""
        lost = self._roster.gone(runner)
        if runner not in self._running:
            self._rations.release(runner)
            if runner in self._retired:
                self._retired.remove(runner)
                self._rations.leave(runner)
        return lost

    def retire(self, runner: ModelInstance) -> None:
        """Begin nothing new with ``runner``, which is to leave."""
        self._retired.add(runner)
        self._roster.retire(runner)

    def holds(self, runner: ModelInstance) -> bool:
        """Return whether an instance that is to leave is needed still."""
        return self._roster.holds(runner)

    def resume(self, request: InferenceRequest) -> None:
        """Take note that the caller of ``request``, of which responses have left, wants more again."""
        self._roster.resume(request)

    def server_stops(self) -> None:
        """Take note that few requests come yet."""
        self._roster.server_stops()

    def finish(self) -> None:
        """Take note that no more requests come."""
        self._roster.finish()

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again, if nothing else happens before."""
        return self._roster.wake_at()

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that waited too long."""
        return self._roster.expire(now)

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Take note that the caller of ``request`` gave up; return all that waits no more for that reason."""
        return self._roster.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits."""
        drained = self._roster.drain()
        self._waiting.clear()
        self._stand_back()
        return drained

    def _may_begin(self, runner: ModelInstance) -> bool:
        may = self._rations.acquire(runner)
        if not may:
            self._waiting.add(runner)
        return may

    def _stand_back(self) -> None:
        """Let others have what the instances that have nothing to do got or asked for."""
        for runner in self._roster.idle:
            if runner not in self._waiting:
                self._rations.release(runner)
