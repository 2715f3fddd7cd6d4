"""The rules a queue and a batcher work by, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
