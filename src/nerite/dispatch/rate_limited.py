"""Instance picker of a model whose executions are limited: an instance needs resources before it starts a batch.

The batch is formed when the resources are available, not before. So requests that wait for resources stay in the queue,
where they may join a batch, overtake, expire and be withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch.interface import Ended, Refusal, SelectivePicker
from nerite.instances.instance import Batch, ModelInstance
from nerite.instances.placement import InstancePlan
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.rate_limiter import RateLimitedInstance, RateLimiter

# Resources that the instances of a model request, use and return (``--rate-limit``).


class InstanceResources:
    """The seats of one model version's instances at the rate limiter, which is shared by the server."""

    def __init__(self, limiter: RateLimiter, model: str) -> None:
        self.granted: Callable[[], None] = lambda: None
        """Called when an instance that waited may execute; possibly in the middle of another call."""
        self._limiter = limiter
        self._model = model
        self._seats: dict[ModelInstance, RateLimitedInstance] = {}

    def enter(self, plans: Sequence[InstancePlan]) -> list[RateLimitedInstance | None]:
        """Reserve seats for new instances that are not passive. Raises ``InvalidArgument``; then none is reserved."""
        claims = [plan.claim for plan in plans if not plan.passive]
        seats = iter(self._limiter.enter(self._model, claims, self._granted))
        return [None if plan.passive else next(seats) for plan in plans]

    def give_up(self, seats: Sequence[RateLimitedInstance | None]) -> None:
        """Undo ``enter``."""
        for seat in seats:
            if seat is not None:
                self._limiter.leave(seat)

    def seat(self, instance: ModelInstance, seat: RateLimitedInstance) -> None:
        """Assign a seat to its instance."""
        self._seats[instance] = seat

    def acquire(self, instance: ModelInstance) -> bool:
        """Return whether an instance may execute now. If not, ``granted`` is called later."""
        return self._limiter.acquire(self._seats[instance])

    def granted_to(self, instance: ModelInstance) -> bool:
        """Return whether an instance holds the resources that it requested."""
        return self._seats[instance].holding

    def executes(self, instance: ModelInstance) -> None:
        """Count an execution."""
        self._seats[instance].count()

    def release(self, instance: ModelInstance, *, again: bool = False) -> None:
        """Release what an instance holds or waits for, unless it has left; ``again``: it requests it once more."""
        seat = self._seats.get(instance)
        if seat is not None:
            self._limiter.release(seat, again=again)

    def leave(self, instance: ModelInstance) -> None:
        """Remove an instance that executes nothing further."""
        self._limiter.leave(self._seats.pop(instance))

    def close(self) -> None:
        """Remove all remaining instances."""
        for instance in tuple(self._seats):
            self.leave(instance)

    def _granted(self) -> None:
        self.granted()


class RateLimitedPicker:
    """Restricts another picker to instances that get their resources. Never prefetches batches."""

    ahead = False

    def __init__(self, picker: SelectivePicker, resources: InstanceResources) -> None:
        self._picker = picker
        self._resources = resources
        self.timed = picker.timed
        self.settles = picker.settles
        # What resources have no part in.
        self.alone = picker.alone
        self.offer = picker.offer
        self.displace = picker.displace
        self.settle = picker.settle
        self.resume = picker.resume
        self.holds = picker.holds
        self.server_stops = picker.server_stops
        self.finish = picker.finish
        self.wake_at = picker.wake_at
        self.expire = picker.expire
        self.withdraw = picker.withdraw
        self._running: set[ModelInstance] = set()
        self._retired: set[ModelInstance] = set()
        self._waiting: set[ModelInstance] = set()
        """Instances that could start a batch if they had their resources."""

    @property
    def idle(self) -> Collection[ModelInstance]:
        """Instances that are up and execute nothing."""
        return self._picker.idle

    @property
    def size(self) -> int:
        """Number of requests that wait."""
        return self._picker.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait, by priority."""
        return self._picker.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason for their release."""
        return self._picker.releases

    def renewed(self) -> RateLimitedPicker:
        """Return an empty picker with the same rules. Busy instances keep their resources until they have finished."""
        return RateLimitedPicker(self._picker.renewed(), self._resources)

    def choose(self, now: int) -> tuple[ModelInstance, Batch] | None:
        """Return an instance that holds its resources, and its batch; None if nothing should start."""
        while True:
            self._waiting.clear()
            chosen = self._picker.choose(now, self._may_begin)
            if chosen is not None:
                self._resources.executes(chosen[0])
                self._running.add(chosen[0])
                return chosen
            self._release_unused()
            # Resources that one instance has released may be what another instance of the model waits for.
            if not any(map(self._resources.granted_to, self._waiting)):
                return None

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Record that ``instance`` has finished a batch, and release its resources."""
        self._running.discard(instance)
        ended = self._picker.ended(instance, batch, responses, took_ns)
        self._resources.release(instance, again=self._picker.size > 0 and instance in self._picker.idle)
        return ended

    def add_instance(self, instance: ModelInstance) -> None:
        """Add ``instance``, which is up and idle; resources from before are released."""
        self._resources.release(instance)
        self._picker.add_instance(instance)

    def remove_instance(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Remove ``instance``, which went down or was removed. If busy, it keeps its resources until its batch ends."""
        lost = self._picker.remove_instance(instance)
        if instance not in self._running:
            self._resources.release(instance)
            if instance in self._retired:
                self._retired.remove(instance)
                self._resources.leave(instance)
        return lost

    def retire(self, instance: ModelInstance) -> None:
        """Start nothing new on ``instance``, which is to be removed."""
        self._retired.add(instance)
        self._picker.retire(instance)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests."""
        drained = self._picker.drain()
        self._waiting.clear()
        self._release_unused()
        return drained

    def _may_begin(self, instance: ModelInstance) -> bool:
        may = self._resources.acquire(instance)
        if not may:
            self._waiting.add(instance)
        return may

    def _release_unused(self) -> None:
        """Release the resources of idle instances that have no batch to start."""
        for instance in self._picker.idle:
            if instance not in self._waiting:
                self._resources.release(instance)
