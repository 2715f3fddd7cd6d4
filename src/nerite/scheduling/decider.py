"""Interface of the deciders that schedule one model, the rules they follow, and the reasons for which batches start.

The deciders themselves are ``DynamicBatcher``, ``DefaultScheduler`` and ``SequenceBatcher``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of a queue: how long a request may wait, how many may wait, and what happens on timeout."""

    timeout_us: int = 0
    """Maximum wait; 0 for no limit."""
    allow_override: bool = False
    """A request may shorten ``timeout_us``, but never lengthen it, nor set a timeout where ``timeout_us`` is 0."""
    delay_on_timeout: bool = False
    """On timeout, move the request behind all requests that are in time instead of rejecting it."""
    max_size: int = 0
    """Maximum number of waiting requests; 0 for no limit."""

    def timeout_for(self, requested_us: int) -> int:
        """Return how many microseconds a request may wait; 0 for no limit."""
        if self.allow_override and 0 < requested_us < self.timeout_us:
            return requested_us
        return self.timeout_us


@dataclass(frozen=True, slots=True)
class BatchingRules:
    """Normalised ``dynamic_batching`` of a model. Sizes are in rows."""

    max_batch_size: int
    preferred_sizes: tuple[int, ...] = ()
    max_delay_us: int = 0
    levels: int = 0
    """Number of priority levels, 1 being the highest; 0 if the model has no priorities."""
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    """Queue policies by level; other levels use ``default_policy``."""
    hold_until: int = 0
    """Start no batch before this many requests wait. A hook for tests (``TRITONSERVER_DELAY_SCHEDULER``)."""

    def level_of(self, priority: int) -> int:
        """Return the level for a request's ``priority``; out-of-range values map to the default level."""
        return priority if 0 < priority <= self.levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        """Return the queue policy of a level."""
        return self.policies.get(level, self.default_policy)


class BatchReason(enum.Enum):
    """Why a batcher started a batch."""

    PREFERRED = "preferred_size"
    """A preferred size was reached."""
    FULL = "full"
    """No waiting request fits: too many rows, or a different shape."""
    SLOTS = "slot_utilization"
    """Enough sequences had a request to reach the minimum slot utilization."""
    DELAY = "delay"
    """The oldest request has reached the maximum queue delay."""
    FREE = "instance_free"
    """An instance was free, and the model has no queue delay."""


DYNAMIC: Final = (BatchReason.PREFERRED, BatchReason.FULL, BatchReason.DELAY, BatchReason.FREE)
"""Reasons of the dynamic batcher, and of sequences with the strategy ``oldest``."""
DIRECT: Final = (BatchReason.SLOTS, BatchReason.DELAY, BatchReason.FREE)
"""Reasons of sequences with the strategy ``direct``."""


class Decider(Protocol):
    """Holds the requests that wait for one model and decides which run next.

    The owner offers requests, calls ``take`` whenever an instance is free, and calls it again at ``wake_at``.
    """

    timed: bool
    """Requests may expire while no instance is free."""

    @property
    def size(self) -> int:
        """Number of waiting requests."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of waiting requests by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches started for each reason; empty for deciders that never batch."""

    def renewed(self) -> Decider:
        """Return an empty decider with the same rules."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Enqueue ``request``, or return the error with which it is rejected."""

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the least important request if it is less important than ``request``; else None."""

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that a free instance should run now; None to wait."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch of ``take`` if no later request could join it; else None."""

    def wake_at(self, free: bool) -> int | None:
        """Return the time at which to call ``expire`` and ``take`` unless another event comes first; None for never.

        ``free``: an instance is free and ``take`` was called last. Otherwise only expiry matters.
        """

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests whose wait exceeded their timeout."""

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``, whose caller cancelled it; return False if it no longer waits here."""

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests, because no instance will ever take them."""
