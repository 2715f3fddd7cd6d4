"""Counting tokens: what the reports of the engines of one model version add up to.

As in ``statistics``, all of it happens on the loop's thread, and a token costs an addition.
"""

from __future__ import annotations

from typing import Final

from nerite.core.engine_report import Begun, Ended, EngineReport, Progress
from nerite.core.request import InferenceRequest
from nerite.observability.distribution import Distribution, one_two_five

# Those of Triton's vLLM backend, so that dashboards read the same.
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
"""What an engine counts by itself, since it began."""


class _Course:
    """A request that an engine has."""

    __slots__ = ("begun", "engine", "first_ns", "last_ns", "late", "tokens")

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.begun: Begun | None = None
        self.tokens = 0
        self.first_ns = 0
        """When the first token was here."""
        self.last_ns = 0
        self.late = False
        """Its deadline has passed."""


class TokenStatistics:
    """Those of one model version, from the first report to its unload."""

    def __init__(self, context_length: int) -> None:
        """``context_length``: tokens of prompt and answer that a sequence can have."""
        lengths = one_two_five(context_length)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.wasted_tokens = dict.fromkeys((Ended.CANCELLED, Ended.TOO_LATE, Ended.FAILED), 0)
        """Generated for requests that had no good end."""
        self.ended = dict.fromkeys(Ended, 0)
        self.tallies: dict[str, int | None] = dict.fromkeys(TALLIES)
        """What the engines have counted, those that are gone, too; None if none of them tells."""
        self.step_tokens = Distribution(_STEP)
        self.first_token = Distribution(_FIRST)
        self.between_tokens = Distribution(_CLOSER)
        self.whole = Distribution(_REQUEST)
        self.queued = Distribution(_REQUEST)
        self.engaged = Distribution(_REQUEST)
        self.reading = Distribution(_REQUEST)
        self.writing = Distribution(_REQUEST)
        self.prompt_lengths = Distribution(lengths)
        self.answer_lengths = Distribution(lengths)
        self.sequences = Distribution(_SEQUENCES)
        self._courses: dict[InferenceRequest, _Course] = {}
        self._latest: dict[object, EngineReport] = {}

    @property
    def under_way(self) -> int:
        """Requests that engines have."""
        return len(self._courses)

    @property
    def latest(self) -> list[EngineReport]:
        """The last report of each engine that is there."""
        return list(self._latest.values())

    def reported(self, engine: object, report: EngineReport | None, now: int) -> None:
        """Count what an engine says; None: it is gone, and what it had has failed."""
        before = self._latest.pop(engine, None)
        if report is None:
            for request, course in list(self._courses.items()):
                if course.engine is engine:
                    self._end(request, course, Ended.FAILED, now)
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
        if request in self._courses:
            self._courses[request].late = True

    def _advance(self, engine: object, progress: Progress, now: int) -> int:
        """Count what a step has brought to a request; return the tokens that the step had to do with."""
        request, tokens, begun, ended = progress
        course = self._courses.get(request)
        if course is None:
            course = self._courses[request] = _Course(engine)
        done = tokens
        if begun is not None:
            course.begun = begun
            done += begun.prompt_tokens
            self.prompt_tokens += begun.prompt_tokens
            self.queued.note((begun.at_ns - request.arrived_ns) / 1e9)
        if tokens:
            self.generated_tokens += tokens
            if course.tokens:
                self.between_tokens.note((now - course.last_ns) / 1e9)
            else:
                course.first_ns = now
                self.first_token.note((now - request.arrived_ns) / 1e9)
            course.tokens += tokens
            course.last_ns = now
        if ended is not None:
            self._end(request, course, ended, now)
        return done

    def _end(self, request: InferenceRequest, course: _Course, ended: Ended, now: int) -> None:
        del self._courses[request]
        if course.late and ended is Ended.CANCELLED:
            ended = Ended.TOO_LATE
        self.ended[ended] += 1
        if ended in self.wasted_tokens:
            self.wasted_tokens[ended] += course.tokens
        self.whole.note((now - request.arrived_ns) / 1e9)
        begun = course.begun
        if begun is None:
            return
        self.engaged.note((now - begun.at_ns) / 1e9)
        self.prompt_lengths.note(begun.prompt_tokens)
        self.answer_lengths.note(course.tokens)
        self.sequences.note(begun.sequences)
        if course.tokens:
            self.reading.note((course.first_ns - begun.at_ns) / 1e9)
            self.writing.note((course.last_ns - course.first_ns) / 1e9)
