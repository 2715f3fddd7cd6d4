"""Why a batch begins when it does."""

from __future__ import annotations

import enum
from typing import Final


class Release(enum.Enum):
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


DYNAMIC: Final = (Release.PREFERRED, Release.FULL, Release.DELAY, Release.FREE)
"""Those of the dynamic batcher, and of sequences with the strategy ``oldest``."""
DIRECT: Final = (Release.SLOTS, Release.DELAY, Release.FREE)
"""Those of sequences with the strategy ``direct``."""
