"""The turnstile of a model whose engine generates tokens: it hears from the engine what was guessed before.

A prompt is counted by the engine, when the request is in. Until then its tokens are estimated from its bytes and the
number of its images, by what those before it had; then the estimate is put right, and who turns out to be too long is
refused after all. As long as there is no engine those that wait go on waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from nerite.backends.llm.demand import IMAGE_TOKENS, Demand, demand, limit
from nerite.backends.llm.sampling import MOST_SEQUENCES
from nerite.cache.gate import Queue
from nerite.core.engine_report import Ended, EngineReport, Progress
from nerite.core.request import InferenceRequest, labelled
from nerite.execution.runner import Runner
from nerite.execution.turnstile import Passage, Turnstile, caller_of, deadline_of
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.admission import Admission
from nerite.scheduling.tokens.decision import Ending
from nerite.scheduling.tokens.gate import Gate
from nerite.scheduling.tokens.headroom import EngineStatistics
from nerite.scheduling.tokens.ratio import TokenRatio
from nerite.scheduling.tokens.ticket import Ticket

_now = time.monotonic_ns
_ENDINGS: Final = {
    Ended.STOP: Ending.COMPLETE,
    Ended.LENGTH: Ending.COMPLETE,
    Ended.CANCELLED: Ending.CANCELLED,
    Ended.TOO_LATE: Ending.DEADLINE,
    Ended.FAILED: Ending.FAILED,
}


class EngineTurnstile(Turnstile):
    """Before the queue of such a model. For the loop's thread only."""

    def __init__(
        self,
        gate: Gate,
        queue: Queue,
        enter: Callable[[InferenceRequest], None],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        admission: Admission | None,
    ) -> None:
        """``admission`` bounds the queue, if no policy does."""
        super().__init__(gate, queue, enter, statistics, loop)
        self._admission = admission
        self._ratio = TokenRatio()
        self._image_ratio = TokenRatio(IMAGE_TOKENS)
        self._reports: dict[Runner, EngineReport] = {}
        """The last of each engine that there is."""
        self._begun = 0
        """Requests that have been let in."""

    def submit(self, request: InferenceRequest) -> None:
        """Let a request in, now or later, or refuse it."""
        admission = self._admission
        if admission is not None and not (admission.grant(self.gate.waiting, self._begun, _now()) or request.caused):
            self._refuse(request, labelled(admission.refusal(), request.id))
        else:
            super().submit(request)

    def reported(self, runner: Runner, report: EngineReport | None) -> None:
        """Take in what an engine says of itself; None: it has died."""
        if report is None:
            self._reports.pop(runner, None)
            return
        self._reports[runner] = report
        reports = self._reports.values()
        total, free = sum(each.total_blocks for each in reports), sum(each.free_blocks for each in reports)
        most = [each.most_sequences for each in reports]
        self.gate.limit_running(sum(most) if all(most) else 0)
        now = _now()
        for progress in report.progress:
            passage = progress.request.sink
            if isinstance(passage, Passage) and isinstance(passage.ticket, PromptTicket):
                self._progressed(passage, passage.ticket, progress, now)
        self.gate.tell(EngineStatistics(total, free, report.block_size))
        self.look_soon()

    def set_ready(self, ready: bool) -> None:
        """Let nobody in as long as there is no engine that could take them up."""
        self.gate.set_ready(ready, _now())
        self.look_soon()

    def _progressed(self, passage: Passage, ticket: PromptTicket, progress: Progress, now: int) -> None:
        gate, request = self.gate, progress.request
        if request.cancelled:
            gate.gone(ticket)
        if progress.begun is not None:
            ticket.cached = progress.begun.cached_tokens
            tokens, of_images = progress.begun.prompt_tokens, progress.begun.image_tokens
            self._ratio.note(ticket.demand.prompt_bytes, tokens - of_images)
            self._image_ratio.note(ticket.demand.images, of_images)
            refusal = gate.correct(ticket, tokens, now)
            if refusal is not None:
                self.stop(request, passage, refusal.as_error())
                return
        if progress.tokens:
            gate.started(ticket, now, ticket.cached)
            gate.progressed(ticket, progress.tokens, now)
        if progress.ended is not None:
            gate.finished(ticket, _ENDINGS[progress.ended], now)

    def _ticket(self, request: InferenceRequest) -> PromptTicket:
        runs = max((report.most_sequences for report in self._reports.values()), default=0)
        asked = demand(request, self.gate.most_output, min(runs or MOST_SEQUENCES, MOST_SEQUENCES))
        return PromptTicket(request, asked, self._ratio, self._image_ratio)

    def _let_in(self, ticket: Ticket, request: InferenceRequest) -> None:
        assert isinstance(ticket, PromptTicket)
        self._begun += 1
        if self.gate.most_output and not ticket.demand.most:
            limit(request, max(self.gate.most_output // ticket.sequences, 1))
        super()._let_in(ticket, request)


class PromptTicket(Ticket):
    """That of a request whose prompt nobody has counted."""

    __slots__ = ("cached", "demand")

    def __init__(self, request: InferenceRequest, asked: Demand, ratio: TokenRatio, image_ratio: TokenRatio) -> None:
        caller = caller_of(request)
        self.demand = asked
        self.cached = 0
        """Tokens of the prompt that the engine had computed before."""
        super().__init__(
            caller.tenant,
            ratio.expected(asked.prompt_bytes) + image_ratio.expected(asked.images),
            asked.most,
            wanted_class=caller.wanted_class,
            deadline=deadline_of(request),
            retry=caller.retry and not request.caused,
            caused=request.caused,
            least=ratio.least(asked.prompt_bytes) + image_ratio.least(asked.images),
            sequences=asked.sequences,
            priority=asked.priority,
            repeats=request.repeats,
        )
