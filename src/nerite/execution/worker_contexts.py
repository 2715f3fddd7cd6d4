"""Where requests stand in their traces, as a worker knows it: the server says so once somebody here wants to know."""

from __future__ import annotations

from collections.abc import Callable

from nerite.core.trace_context import TraceContext
from nerite.execution import messages


class WorkerContexts:
    """What the server said, by batch. For any thread."""

    def __init__(self, ask: Callable[[], object]) -> None:
        """``ask`` has the server say it: of the batches that are here before it returns, then of each before it comes.

        Most models never want to know, and then it would cost a message for each batch.
        """
        self._ask = ask
        self._asked = False
        self._told: dict[int, tuple[memoryview, int]] = {}
        """The message, and its count."""

    def hear(self, body: memoryview, count: int) -> None:
        """Take a CONTEXTS message."""
        self._told[messages.read_batch(body)[0]] = body, count

    def may_tell(self, batch: int) -> bool:
        """Return False if it is known that nothing is traced in a batch."""
        return not self._asked or batch in self._told

    def of(self, batch: int) -> dict[int, TraceContext]:
        """Return the span of the execution of each request that is traced, by its place in the batch."""
        if not self._asked:
            self._ask()
            self._asked = True
        told = self._told.get(batch)
        return {} if told is None else messages.read_contexts(*told)

    def forget(self, batch: int) -> None:
        """Take note that a batch is over."""
        self._told.pop(batch, None)
