"""Before everything else of a version whose engine generates tokens: requests that have an idempotency key.

Before its response cache, too: a key is kept whichever way its request was answered, and a request that has the key of
another one is refused though the cache may have an answer to it.
"""

from __future__ import annotations

from collections.abc import Callable

from nerite.cache.gate import Queue
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.execution.rejoining import Rejoining, key_of
from nerite.execution.turnstile import caller_of
from nerite.scheduling.tokens.gate import Gate


class KeyedQueue:
    """A queue that requests with a key go around, where another one has been made for them. For the loop's thread."""

    def __init__(self, queue: Queue, gate: Gate, rejoining: Rejoining) -> None:
        """``gate`` counts those that join."""
        self.queue = queue
        self._gate = gate
        self._rejoining = rejoining

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._gate.model

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self.queue.pending

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self.queue.in_flight

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request, or have it join one with the same key."""
        key = key_of(request)
        if key is None:
            self.queue.submit(request)
        else:
            self._rejoining.ask(request, key, self)

    def joined(self, request: InferenceRequest) -> None:
        """Count a request that joins another."""
        caller = caller_of(request)
        self._gate.joined(caller.tenant, caller.wanted_class)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now. No more requests come."""
        self._rejoining.let_go(self)
        self.queue.when_drained(call)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``."""
        self.queue.abandon(error)
