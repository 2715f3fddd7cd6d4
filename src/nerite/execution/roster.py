"""Which instance runs which batch now: one decision, and who makes it for a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution.runner import Batch, Runner
from nerite.scheduling.release import Release

Refusal: TypeAlias = tuple[InferenceRequest, NeriteError]
"""A request that waited, and why it waits no more."""
May: TypeAlias = Callable[[Runner], bool]
"""Says whether an instance may begin a batch now."""
Ended: TypeAlias = tuple[Batch, Sequence[InferenceResponse | None], Batch]
"""Requests that have come to their end, the answer to each, and those that ran with them and get none from this run:
because they run once more, or because they stood in the batch for nobody."""


class Roster(Protocol):
    """Holds the requests that wait for one model, knows its instances, and brings both together.

    Whoever owns it offers requests and reports what happens to instances; it asks ``choose`` whenever that may have
    changed the answer, and calls ``expire`` and ``choose`` again at ``wake_at``.
    """

    timed: bool
    """Something may expire while no instance is free."""
    settles: bool
    """Callers get what ``settle`` makes of responses that come one by one."""

    @property
    def idle(self) -> Collection[Runner]:
        """The instances that are up and run nothing."""

    @property
    def ahead(self) -> bool:
        """Whether a batch may go to an instance that is not idle."""

    @property
    def size(self) -> int:
        """Requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""

    @property
    def releases(self) -> Mapping[Release, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def renewed(self) -> Roster:
        """Return an empty one with the same rules, which knows no instances."""

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch in which one request of ``batch``, which ``choose`` returned, runs without the others."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return who is refused because too many wait: ``request``, or another that matters less and is dropped here.

        None if ``request`` has to be let in all the same, because it goes on with something.
        """

    def choose(self, now: int) -> tuple[Runner, Batch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start."""

    def ended(self, runner: Runner, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int) -> Ended:
        """Note that ``runner`` has finished a batch."""

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Take note of one of several responses to a request; return what its caller gets of it, None if it has none.

        What is ``empty`` and not the last, the caller does not get.
        """

    def came(self, runner: Runner) -> None:
        """Note that ``runner`` is there, up and idle."""

    def gone(self, runner: Runner) -> Sequence[Refusal]:
        """Note that ``runner`` went down or left, and return the requests that only it could have run."""

    def retire(self, runner: Runner) -> None:
        """Begin nothing new with ``runner``, which is to leave."""

    def holds(self, runner: Runner) -> bool:
        """Return whether an instance that is to leave is needed still, for something that it has begun."""

    def resume(self, request: InferenceRequest) -> None:
        """Take note that the caller of ``request``, of which responses have left, wants more again."""

    def server_stops(self) -> None:
        """Take note that few requests come yet: what waits for others in vain is for ``expire``."""

    def finish(self) -> None:
        """Take note that no more requests come: nothing need be kept for any."""

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again if nothing else happens before; None for never.

        ``choose`` was asked last.
        """

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that waited too long."""

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Take note that the caller of ``request`` gave up; return all that waits no more for that reason.

        ``request`` is not among it if it runs.
        """

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits, because nobody will ever take it."""


class SelectiveRoster(Roster, Protocol):
    """A roster that lets somebody else say which instances may begin."""

    def renewed(self) -> SelectiveRoster:
        """Return an empty one with the same rules, which knows no instances."""

    def choose(self, now: int, may: May | None = None) -> tuple[Runner, Batch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start.

        ``may`` is asked of idle instances that there is a batch for, one after the other, until one may begin.
        """
