"""What a step of an engine has brought, until all of it leaves together: one report, and the responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nerite.backends.interface import Reporter
from nerite.backends.llm.answer import Answer
from nerite.backends.llm.engine import Delta, EngineStats, FinishReason
from nerite.core.engine_report import Begun, Ended, EngineReport, Progress
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest

_ENDED: Final = {
    FinishReason.STOP: Ended.STOP,
    FinishReason.LENGTH: Ended.LENGTH,
    FinishReason.ABORT: Ended.CANCELLED,
}


class Step:
    """The one that is under way. For the engine's thread alone."""

    def __init__(self, reporter: Reporter, patience: int) -> None:
        """``patience``: seconds that one may take; 0: any time."""
        self._reporter = reporter
        self._patience = patience
        self._progress: list[Progress] = []
        self._responses: list[Callable[[], None]] = []

    def add(self, progress: Progress, respond: Callable[[], None]) -> None:
        """Note what has become of a request, and how it is answered."""
        self._progress.append(progress)
        self._responses.append(respond)

    def over(self, stats: EngineStats) -> None:
        """Tell the server how the engine is, and answer the requests."""
        progress, self._progress = self._progress, []
        responses, self._responses = self._responses, []
        with self._reporter.together():
            self._reporter.report(
                EngineReport(
                    stats.running,
                    stats.waiting,
                    stats.total_blocks,
                    stats.free_blocks,
                    stats.block_size,
                    stats.context_length,
                    stats.most_sequences,
                    self._patience,
                    stats.failures,
                    stats.prefix_queries,
                    stats.prefix_hits,
                    stats.preemptions,
                    stats.drafted,
                    stats.accepted,
                    progress,
                )
            )
            for respond in responses:
                respond()


class Follower:
    """Follows one request through an engine, as its listener."""

    def __init__(self, request: InferenceRequest, answer: Answer, sequences: int, step: Step) -> None:
        self._request = request
        self._answer = answer
        self._sequences = sequences
        self._unfinished = sequences
        self._begun: Begun | None = None
        """Until it is told."""
        self._step = step

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Note how long the prompt is."""
        self._begun = Begun(time.monotonic_ns(), prompt_tokens, cached_tokens, self._sequences, image_tokens)
        self._answer.admitted(prompt_tokens)
        self._tell(0, None, _nothing)

    def advanced(self, deltas: Sequence[Delta]) -> None:
        """Have what came told of, and the request answered with it."""
        ended = None
        for delta in deltas:
            if delta.finish_reason is not None:
                self._unfinished -= 1
                ended = delta.finish_reason
        tokens = sum(len(delta.tokens) for delta in deltas)
        of_all = _ENDED[ended] if ended is not None and not self._unfinished else None
        self._tell(tokens, of_all, partial(self._answer.advanced, deltas))

    def failed(self, error: NeriteError) -> None:
        """Have it told, and the request answered with it."""
        self._tell(0, Ended.FAILED, partial(self._answer.failed, error))

    def _tell(self, tokens: int, ended: Ended | None, respond: Callable[[], None]) -> None:
        begun, self._begun = self._begun, None
        self._step.add(Progress(self._request, tokens, begun, ended), respond)


def _nothing() -> None:
    """Answer nothing yet."""
