"""Times of the stages of a model load, which are logged in one line when the model is ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_log = logging.getLogger("nerite.repository")

_SHORT: Final = 0.005
"""Seconds below which a stage is left out of the message."""

_current: ContextVar[LoadTimes | None] = ContextVar("load_times", default=None)


class LoadTimes:
    """Times of one load of one model. Concurrent work counts once: a stage lasts while any task is in it."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self.model = model
        self.clock = clock
        self._began = clock()
        self._intervals: dict[str, list[tuple[float, float]]] = {}

    def note(self, stage: str, began: float, ended: float) -> None:
        """Record that a task was in a stage."""
        self._intervals.setdefault(stage, []).append((began, ended))

    @property
    def seconds(self) -> float:
        """Seconds since the load started."""
        return self.clock() - self._began

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in the order in which the stages started."""
        first = sorted(self._intervals, key=lambda stage: min(self._intervals[stage]))
        return {stage: _covered(self._intervals[stage]) for stage in first}

    def __str__(self) -> str:
        parts = [f"{stage} {seconds:.2f}" for stage, seconds in self.stages.items() if seconds >= _SHORT]
        return f"{self.seconds:.2f} s" + (f" ({', '.join(parts)})" if parts else "")


@contextmanager
def load_of(model: str) -> Iterator[None]:
    """Attribute the time spent in this context, and in tasks started in it, to a load."""
    before = _current.set(LoadTimes(model))
    try:
        yield
    finally:
        _current.reset(before)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Attribute the time spent in this context to a stage of the current load, if any."""
    times = _current.get()
    if times is None:
        yield
        return
    began = times.clock()
    try:
        yield
    finally:
        times.note(name, began, times.clock())


def log_loaded(model: str) -> None:
    """Log that a model is ready, with the times of its load if this context is a load of it."""
    times = _current.get()
    if times is None or times.model != model:  # such as an ensemble after the load of one of its models
        _log.info("successfully loaded '%s'", model, extra={"extras": {"model": model}})
        return
    stages = {stage: round(seconds, 3) for stage, seconds in times.stages.items()}
    extras = {"model": model, "seconds": round(times.seconds, 3), "stages": stages}
    _log.info("successfully loaded '%s' in %s", model, times, extra={"extras": extras})


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    covered, until = 0.0, -float("inf")
    for began, ended in sorted(intervals):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered
