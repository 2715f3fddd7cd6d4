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

    def seat(self, instance: ModelInstance, seat: RateLimitedInstance) -> None:
        """Note whose seat it is."""
        self._seats[instance] = seat

    def acquire(self, instance: ModelInstance) -> bool:
        """Return whether an instance may execute now. If not, ``granted`` is called later."""
        return self._limiter.acquire(self._seats[instance])

    def granted_to(self, instance: ModelInstance) -> bool:
        """Return whether an instance has what it asked for."""
        return self._seats[instance].holding

    def executes(self, instance: ModelInstance) -> None:
        """Count an execution."""
        self._seats[instance].count()

    def release(self, instance: ModelInstance, *, again: bool = False) -> None:
        """Let others have what an instance had or waited for, unless it has left; ``again``: it wants it once more."""
        seat = self._seats.get(instance)
        if seat is not None:
            self._limiter.release(seat, again=again)

    def leave(self, instance: ModelInstance) -> None:
        """Forget an instance that will not execute any more."""
        self._limiter.leave(self._seats.pop(instance))

    def close(self) -> None:
        """Forget all that are left."""
        for instance in tuple(self._seats):
            self.leave(instance)

    def _granted(self) -> None:
        self.granted()


class RateLimitedPicker:
    """Another roster, which decides, and what its instances may have. Nothing lines up behind one that runs."""

    ahead = False

    def __init__(self, picker: SelectivePicker, resources: InstanceResources) -> None:
        self._picker = picker
        self._resources = resources
        self.timed = picker.timed
        self.settles = picker.settles
        self._running: set[ModelInstance] = set()
        self._retired: set[ModelInstance] = set()
        self._waiting: set[ModelInstance] = set()
        """Those that could begin a batch, if they had what they need."""

    @property
    def idle(self) -> Collection[ModelInstance]:
        """The instances that are up and run nothing."""
        return self._picker.idle

    @property
    def size(self) -> int:
        """Requests that wait."""
        return self._picker.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""
        return self._picker.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """How many batches began for which reason."""
        return self._picker.releases

    def renewed(self) -> RateLimitedPicker:
        """Return an empty one with the same rules. An instance that runs keeps what it has until it has finished."""
        return RateLimitedPicker(self._picker.renewed(), self._resources)

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch in which one request of ``batch`` runs without the others."""
        return self._picker.alone(batch, index)

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""
        return self._picker.offer(request, now)

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return who is refused because too many wait."""
        return self._picker.give_way(request)

    def choose(self, now: int) -> tuple[ModelInstance, Batch] | None:
        """Return an instance that has what it needs, and its batch; None if nothing should start."""
        while True:
            self._waiting.clear()
            chosen = self._picker.choose(now, self._may_begin)
            if chosen is not None:
                self._resources.executes(chosen[0])
                self._running.add(chosen[0])
                return chosen
            self._stand_back()
            # What one of our instances stands back from may be what another one waits for.
            if not any(map(self._resources.granted_to, self._waiting)):
                return None

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Note that ``instance`` has finished a batch, and have it give back what it had."""
        self._running.discard(instance)
        ended = self._picker.ended(instance, batch, responses, took_ns)
        self._resources.release(instance, again=self._picker.size > 0 and instance in self._picker.idle)
        return ended

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Take note of one of several responses to a request; return what its caller gets of it."""
        return self._picker.settle(request, response)

    def came(self, instance: ModelInstance) -> None:
        """Note that ``instance`` is there, up and idle: what it had before it gives back."""
        self._resources.release(instance)
        self._picker.came(instance)

    def gone(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Note that ``instance`` went down or left. What it has it gives back now, or when its batch has ended."""
        lost = self._picker.gone(instance)
        if instance not in self._running:
            self._resources.release(instance)
            if instance in self._retired:
                self._retired.remove(instance)
                self._resources.leave(instance)
        return lost

    def retire(self, instance: ModelInstance) -> None:
        """Begin nothing new with ``instance``, which is to leave."""
        self._retired.add(instance)
        self._picker.retire(instance)

    def holds(self, instance: ModelInstance) -> bool:
        """Return whether an instance that is to leave is needed still."""
        return self._picker.holds(instance)

    def resume(self, request: InferenceRequest) -> None:
        """Take note that the caller of ``request``, of which responses have left, wants more again."""
        self._picker.resume(request)

    def server_stops(self) -> None:
        """Take note that few requests come yet."""
        self._picker.server_stops()

    def finish(self) -> None:
        """Take note that no more requests come."""
        self._picker.finish()

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again, if nothing else happens before."""
        return self._picker.wake_at()

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that waited too long."""
        return self._picker.expire(now)

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Take note that the caller of ``request`` gave up; return all that waits no more for that reason."""
        return self._picker.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits."""
        drained = self._picker.drain()
        self._waiting.clear()
        self._stand_back()
        return drained

    def _may_begin(self, instance: ModelInstance) -> bool:
        may = self._resources.acquire(instance)
        if not may:
            self._waiting.add(instance)
        return may

    def _stand_back(self) -> None:
        """Let others have what the instances that have nothing to do got or asked for."""
        for instance in self._picker.idle:
            if instance not in self._waiting:
                self._resources.release(instance)
