"""The rules a sequence batcher works by, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from nerite.scheduling.policy import BatchingRules


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """A model's ``sequence_batching``, normalised."""

    model: str
    slots: int
    """Sequences that an instance works on side by side."""
    max_idle_us: int
    batching: BatchingRules | None = None
    """How requests are gathered under the strategy ``oldest``; None for ``direct``."""
    max_delay_us: int = 0
    """``direct``: how long a batch waits for ``min_utilization``."""
    min_utilization: float = 0.0
    """``direct``: the fraction of slots with a request that a batch need not wait with."""
    hold_until: int = 0
    """``direct``: start nothing before this many wait in slots (``TRITONSERVER_DELAY_SCHEDULER``, a hook for tests)."""
    hold_until_backlog: int = 0
    """Nor, then, before this many wait for a slot (``TRITONSERVER_BACKLOG_DELAY_SCHEDULER``)."""
