"""Where the requests to a version go: to its instances, or to the models that it is put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nerite.cache.gate import Queue
from nerite.core.request import InferenceRequest
from nerite.scheduling.release import Release


class Scheduler(Queue, Protocol):
    """One for a model version. For the loop's thread only."""

    sound: bool
    """The last audit found nothing to restore."""

    def audit(self) -> list[str]:
        """Compare what was handed out with what came back, restore what differs, and return what that was."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait for an instance, by priority."""

    @property
    def releases(self) -> Mapping[Release, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""

    def server_stops(self) -> None:
        """Take note that the server stops: finish what is there, and refuse what cannot be."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the requests to other models that have to be answered before ``request``, which is here, can be."""

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here: it cannot be answered without that any more."""
