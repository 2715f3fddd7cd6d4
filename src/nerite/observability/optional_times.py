"""What Triton counts of times where a flag says so: summaries, and a histogram of first responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.observability.distribution import Distribution
from nerite.observability.quantiles import Quantiles

FIRST_RESPONSE_MS: Final = (100, 500, 2000, 5000)
STAGES: Final = ("request", "queue", "compute_input", "compute_infer", "compute_output", "hit", "miss")
"""What there are quantiles of, in microseconds."""


class OptionalTimes:
    """Those of one model version."""

    def __init__(self, first_response: Sequence[float] | None, quantiles: Sequence[float] | None) -> None:
        """``first_response``: bounds in milliseconds. None: there is no histogram, or there are no summaries."""
        self.first_response = None if first_response is None else Distribution(first_response)
        self._wanted = quantiles
        self._stages = {} if quantiles is None else {stage: Quantiles() for stage in STAGES}

    def quantiles(self, stage: str) -> list[tuple[float, float]] | None:
        """Return the quantiles of a stage in the last minute, None if there are none to be."""
        return None if self._wanted is None else self._stages[stage].read(self._wanted, time.monotonic_ns())

    def ran(self, batch: Sequence[InferenceRequest], marks: Marks, now: int) -> None:
        """Note a batch that ran."""
        before, during = marks.inputs_ready_ns - marks.started_ns, marks.computed_ns - marks.inputs_ready_ns
        for request in batch:
            whole = now - request.arrived_ns
            self.responded(whole)
            self.took(whole, marks.started_ns - request.queued_ns, before, during, marks.ended_ns - marks.computed_ns)

    def took(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Note ``count`` requests of which each took these times."""
        times = (whole, queue, before, during, after)
        self._note(dict(zip(STAGES, times, strict=False)), count)

    def found(self, whole: int, queue: int, looked: int) -> None:
        """Note a request that was answered from the cache, in ``looked``."""
        self.responded(whole)
        self._note({"request": whole, "queue": queue, "hit": looked})

    def missed(self, looked: int) -> None:
        """Note that a request was not in the cache, which took ``looked`` to see."""
        self._note({"miss": looked})

    def responded(self, whole: int, count: int = 1) -> None:
        """Note the first responses to ``count`` requests."""
        if self.first_response is not None:
            self.first_response.note(whole / 1e6, count)

    def _note(self, times: dict[str, int], count: int = 1) -> None:
        if self._wanted is not None:
            now = time.monotonic_ns()
            for stage, ns in times.items():
                self._stages[stage].note(ns // 1000, now, count)
