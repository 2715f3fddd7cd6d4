"""What the instances of a model need of the server's resources: asked for, used, given back (``--rate-limit``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nerite.execution.instance_plan import InstancePlan
from nerite.execution.runner import Runner
from nerite.scheduling.rate_limiter import RateLimiter, Seat


class Rations:
    """One for a model version: the seats of its instances at the limiter, which is the server's."""

    def __init__(self, limiter: RateLimiter, model: str) -> None:
        self.granted: Callable[[], None] = lambda: None
        """Called when an instance that waited may execute; in no turn of its own."""
        self._limiter = limiter
        self._model = model
        self._seats: dict[Runner, Seat] = {}

    def enter(self, plans: Sequence[InstancePlan]) -> list[Seat | None]:
        """Have seats for new instances, none for passive ones. Raises ``InvalidArgument``; none is left then."""
        claims = [plan.claim for plan in plans if not plan.passive]
        seats = iter(self._limiter.enter(self._model, claims, self._granted))
        return [None if plan.passive else next(seats) for plan in plans]

    def give_up(self, seats: Sequence[Seat | None]) -> None:
        """Take back ``enter``."""
        for seat in seats:
            if seat is not None:
                self._limiter.leave(seat)

    def seat(self, runner: Runner, seat: Seat) -> None:
        """Note whose seat it is."""
        self._seats[runner] = seat

    def acquire(self, runner: Runner) -> bool:
        """Return whether an instance may execute now. If not, ``granted`` is called later."""
        return self._limiter.acquire(self._seats[runner])

    def granted_to(self, runner: Runner) -> bool:
        """Return whether an instance has what it asked for."""
        return self._seats[runner].holding

    def executes(self, runner: Runner) -> None:
        """Count an execution."""
        self._seats[runner].count()

    def release(self, runner: Runner, *, again: bool = False) -> None:
        """Let others have what an instance had or waited for, unless it has left; ``again``: it wants it once more."""
        seat = self._seats.get(runner)
        if seat is not None:
            self._limiter.release(seat, again=again)

    def leave(self, runner: Runner) -> None:
        """Forget an instance that will not execute any more."""
        self._limiter.leave(self._seats.pop(runner))

    def close(self) -> None:
        """Forget all that are left."""
        for runner in tuple(self._seats):
            self.leave(runner)

    def _granted(self) -> None:
        self.granted()
