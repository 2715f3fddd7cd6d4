"""Why a batch begins when it does."""

from __future__ import annotations

import enum


class Release(enum.Enum):
    """The reasons of the dynamic batcher."""

    PREFERRED = "preferred_size"
    """A preferred size was reached."""
    FULL = "full"
    """Nothing that waits fits any more: for the number of its rows, or for its shape."""
    DELAY = "delay"
    """The oldest request has waited as long as it may for others."""
    FREE = "instance_free"
    """An instance was free, and the model has no requests wait for others."""
