"""What every scheduler of a model answers to."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest

# The rules a queue and a batcher work by, as plain data.


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long a request may wait in a queue, how many may wait, and what happens when its time is over."""

    timeout_us: int = 0
    """0: for ever."""
    allow_override: bool = False
    """A request may ask for a shorter time than ``timeout_us``; never for a longer one, nor for one where that is 0."""
    delay_on_timeout: bool = False
    """When time is over: move behind everything that is in time, instead of refusing."""
    max_size: int = 0
    """0: any number."""

    def timeout_for(self, requested_us: int) -> int:
        """Return the microseconds a request may wait, 0 for ever."""
        if self.allow_override and 0 < requested_us < self.timeout_us:
            return requested_us
        return self.timeout_us


@dataclass(frozen=True, slots=True)
class BatchingRules:
    """A model's ``dynamic_batching``, normalised. Sizes are in rows."""

    max_batch_size: int
    preferred_sizes: tuple[int, ...] = ()
    max_delay_us: int = 0
    levels: int = 0
    """Priority levels, 1 the highest; 0 means that there are no priorities."""
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    """Of single levels; the others have ``default_policy``."""
    hold_until: int = 0
    """Start nothing before this many requests wait. A hook for tests (``TRITONSERVER_DELAY_SCHEDULER``)."""

    def level_of(self, priority: int) -> int:
        """Return the level a request's ``priority`` means: what is out of range means the default."""
        return priority if 0 < priority <= self.levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        """Return the queue policy of a level."""
        return self.policies.get(level, self.default_policy)


# Why a batch begins when it does.


class BatchReason(enum.Enum):
    """The reasons of whoever gathers requests."""

    PREFERRED = "preferred_size"
    """A preferred size was reached."""
    FULL = "full"
    """Nothing that waits fits any more: for the number of its rows, or for its shape."""
    SLOTS = "slot_utilization"
    """As many sequences as the batch should have, had a request."""
    DELAY = "delay"
    """The oldest request has waited as long as it may for others."""
    FREE = "instance_free"
    """An instance was free, and the model has no requests wait for others."""


DYNAMIC: Final = (BatchReason.PREFERRED, BatchReason.FULL, BatchReason.DELAY, BatchReason.FREE)
"""Those of the dynamic batcher, and of sequences with the strategy ``oldest``."""
DIRECT: Final = (BatchReason.SLOTS, BatchReason.DELAY, BatchReason.FREE)
"""Those of sequences with the strategy ``direct``."""


class Decider(Protocol):
    """Holds the requests that wait for one model, and says which run next.

    Whoever owns it offers requests, asks ``take`` whenever an instance is free, and asks again at ``wake_at``.
    """

    timed: bool
    """Requests may expire while no instance is free."""

    @property
    def size(self) -> int:
        """Requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def renewed(self) -> Decider:
        """Return an empty one with the same rules."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the request that matters least, if it matters less than ``request``; else None."""

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that a free instance should run now; None if it should wait."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that ``take`` would, if no request that is yet to come could join it; else None."""

    def wake_at(self, free: bool) -> int | None:
        """Return when to call ``expire`` and ``take`` again if nothing else happens before; None for never.

        ``free``: an instance is, and ``take`` was asked last. If none is, only what expires matters.
        """

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests that waited too long."""

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``, whose caller gave up; False if it does not wait here any more."""

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits, because nobody will ever take it."""
