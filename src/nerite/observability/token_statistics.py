"""Token counts of a language model, accumulated from the reports of its engines.

As in ``statistics``, everything happens on the loop's thread without locks, and a token costs an addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.request import InferenceRequest
from nerite.observability.histogram import Histogram, one_two_five

# Bounds of Triton's vLLM backend, so that dashboards keep working.
_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BETWEEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CLOSER: Final = (0.001, 0.0025, 0.005, *BETWEEN, 5.0, 7.5, 10.0)
_REQUEST: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_STEP: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES: Final = (1, 2, 5, 10, 20)

TALLIES: Final = ("prefix_queries", "prefix_hits", "preemptions", "drafted", "accepted", "failures")
"""Counters that an engine keeps itself, since its start."""


class _Progress:
    """Progress of a request that an engine has."""

    __slots__ = ("begun", "engine", "first_ns", "last_ns", "late", "tokens")

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.begun: RequestBegun | None = None
        self.tokens = 0
        self.first_ns = 0
        """Arrival time of the first token."""
        self.last_ns = 0
        self.late = False
        """Cut because its deadline has passed."""


class TokenStatistics:
    """Token counts of one model version, from the first report to the unload."""

    def __init__(self, context_length: int) -> None:
        """``context_length``: maximum number of tokens of a sequence, prompt and answer together."""
        lengths = one_two_five(context_length)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.wasted_tokens = dict.fromkeys((RequestEnded.CANCELLED, RequestEnded.TOO_LATE, RequestEnded.FAILED), 0)
        """Tokens generated for requests that did not succeed."""
        self.ended = dict.fromkeys(RequestEnded, 0)
        self.tallies: dict[str, int | None] = dict.fromkeys(TALLIES)
        """Sums of the counters of all engines, including those that are gone; None if no engine reports the counter."""
        self.step_tokens = Histogram(_STEP)
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_CLOSER)
        self.whole = Histogram(_REQUEST)
        self.queued = Histogram(_REQUEST)
        self.engaged = Histogram(_REQUEST)
        self.reading = Histogram(_REQUEST)
        self.writing = Histogram(_REQUEST)
        self.prompt_lengths = Histogram(lengths)
        self.answer_lengths = Histogram(lengths)
        self.sequences = Histogram(_SEQUENCES)
        self._under_way: dict[InferenceRequest, _Progress] = {}
        self._latest: dict[object, EngineReport] = {}

    @property
    def under_way(self) -> int:
        """Number of requests that the engines have."""
        return len(self._under_way)

    @property
    def latest(self) -> list[EngineReport]:
        """Last report of each running engine."""
        return list(self._latest.values())

    def reported(self, engine: object, report: EngineReport | None, now: int) -> None:
        """Count the report of an engine. None: the engine is gone, and its requests have failed."""
        before = self._latest.pop(engine, None)
        if report is None:
            for request, mine in list(self._under_way.items()):
                if mine.engine is engine:
                    self._end(request, mine, RequestEnded.FAILED, now)
            return
        self._latest[engine] = report
        tallies = self.tallies
        for name in TALLIES:
            count = getattr(report, name)
            if count is not None:
                known = getattr(before, name, None) or 0
                tallies[name] = (tallies[name] or 0) + max(count - known, 0)
        if report.progress:
            self.step_tokens.note(sum([self._advance(engine, progress, now) for progress in report.progress]))

    def too_late(self, request: InferenceRequest) -> None:
        """Note that a request is cut because its deadline has passed."""
        if request in self._under_way:
            self._under_way[request].late = True

    def _advance(self, engine: object, progress: RequestProgress, now: int) -> int:
        """Count the effect of an engine step on a request; return the number of tokens that the step processed."""
        request, tokens, begun, ended = progress
        mine = self._under_way.get(request)
        if mine is None:
            mine = self._under_way[request] = _Progress(engine)
        done = tokens
        if begun is not None:
            mine.begun = begun
            done += begun.prompt_tokens
            self.prompt_tokens += begun.prompt_tokens
            self.queued.note((begun.at_ns - request.arrived_ns) / 1e9)
        if tokens:
            self.generated_tokens += tokens
            if mine.tokens:
                self.between_tokens.note((now - mine.last_ns) / 1e9)
            else:
                mine.first_ns = now
                self.first_token.note((now - request.arrived_ns) / 1e9)
            mine.tokens += tokens
            mine.last_ns = now
        if ended is not None:
            self._end(request, mine, ended, now)
        return done

    def _end(self, request: InferenceRequest, mine: _Progress, ended: RequestEnded, now: int) -> None:
        del self._under_way[request]
        if mine.late and ended is RequestEnded.CANCELLED:
            ended = RequestEnded.TOO_LATE
        self.ended[ended] += 1
        if ended in self.wasted_tokens:
            self.wasted_tokens[ended] += mine.tokens
        self.whole.note((now - request.arrived_ns) / 1e9)
        begun = mine.begun
        if begun is None:
            return
        self.engaged.note((now - begun.at_ns) / 1e9)
        self.prompt_lengths.note(begun.prompt_tokens)
        self.answer_lengths.note(mine.tokens)
        self.sequences.note(begun.sequences)
        if mine.tokens:
            self.reading.note((mine.first_ns - begun.at_ns) / 1e9)
            self.writing.note((mine.last_ns - mine.first_ns) / 1e9)


def kv_utilization(reports: Iterable[EngineReport]) -> float:
    """Return the fraction of the KV blocks of several engines that is in use."""
    used, free = kv_blocks(reports)
    return used / (used + free) if used + free else 0.0


def kv_blocks(reports: Iterable[EngineReport]) -> tuple[int, int]:
    """Return the number of KV blocks of several engines that are in use, and that are free."""
    total = free = 0
    for each in reports:
        total += each.total_blocks
        free += each.free_blocks
    return total - free, free
