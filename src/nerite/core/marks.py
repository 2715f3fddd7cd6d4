"""The times of one execution."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nerite.core.trace_context import TraceContext


class Marks:
    """When one execution had its inputs in place and when the computation was over (``time.monotonic_ns``).

    A backend that cannot tell the phases apart leaves them: input and output then count as zero time.
    """

    __slots__ = (
        "computed_ns",
        "ended_ns",
        "failed",
        "followed",
        "inputs_ready_ns",
        "leader",
        "requests",
        "started_ns",
    )

    def __init__(self) -> None:
        self.started_ns = self.inputs_ready_ns = time.monotonic_ns()
        self.computed_ns = 0
        self.ended_ns = 0
        self.failed = False
        """The execution as a whole failed: it raised, or did not answer every request. Set by ``execution``."""
        self.followed = False
        """Other models went on with the answers, which are here later than they were ready."""
        self.requests = 0
        """How many were executed together, where somebody traces one of them."""
        self.leader: TraceContext | None = None
        """Of these, the span of the first that is traced: what the model itself notes is under that."""

    def inputs_ready(self) -> None:
        """Note that the inputs are where the framework wants them."""
        self.inputs_ready_ns = time.monotonic_ns()

    def computed(self) -> None:
        """Note that the framework is done and the outputs remain to be handed over."""
        self.computed_ns = time.monotonic_ns()

    def end(self) -> None:
        """Note that everything is over. Called by ``execution``, not by the backend."""
        self.ended_ns = time.monotonic_ns()
        if not self.computed_ns:
            self.computed_ns = self.ended_ns
