"""Where the requests to a version go: to its instances, or to the models that it is put together from."""

from __future__ import annotations

from typing import Protocol

from nerite.cache.gate import Queue


class Scheduler(Queue, Protocol):
    """One for a model version. For the loop's thread only."""

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""
