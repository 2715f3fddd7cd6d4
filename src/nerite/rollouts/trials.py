"""Trials of a candidate with real requests: an answer, a stream, a cancellation, a deadline. Bounded in time.

The baseline gets one request as well, for comparison, or a few if sizes do not suit it. It is neither cancelled nor
given a deadline, because it serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unknown
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import shape_text
from nerite.models.running_version import RunningVersion
from nerite.rollouts.difference import Difference, blocks, notes, warns
from nerite.rollouts.trial_sample import TrialSample

_FEW_TOKENS: Final = 16
_MANY_TOKENS: Final = 2048
_DEADLINE_US: Final = 100_000
_STEP: Final = 0.002
"""Seconds between two looks at whether an instance has begun a request."""
_ALL_AT_ONCE: Final = 0.02
"""Share of a stream's time between its first and last response below which it came all at once."""
_OF_SIZES: Final = (InvalidArgument, Internal, Unknown)
"""Errors that other sizes of the inputs may avoid."""


class TrialLimits(NamedTuple):
    """Seconds that a trial may take."""

    answer: float = 30.0
    """Until the last response to a request."""
    cancel: float = 10.0
    """From the cancellation of a request, or its deadline, until it has ended."""


class TrialOutcome(NamedTuple):
    """How a request of a trial ended."""

    ended: bool
    """False if the last response did not arrive in time."""
    error: NeriteError | None = None
    responses: int = 0
    """Responses with outputs."""
    first: float = 0.0
    """Seconds until the first response."""
    last: float = 0.0
    outputs: tuple[str, ...] = ()
    """Name, type and shape of each output of the first response."""

    def __str__(self) -> str:
        """Return the outcome for people."""
        if not self.ended:
            return "no answer"
        if self.error is not None:
            return f"error: {self.error.message}"
        return f"{self.responses} response{'' if self.responses == 1 else 's'} in {self.last * 1000:.0f} ms"


class TrialRequest:
    """One request to a version, and the sink of its responses. For the loop's thread."""

    def __init__(self, running: RunningVersion, sample: TrialSample, *, tokens: int = 0, timeout_us: int = 0) -> None:
        """Submit the request. An error of the request's form is its outcome."""
        self._running = running
        self._began = time.monotonic()
        self._times: list[float] = []
        self._outputs: tuple[str, ...] = ()
        self._error: NeriteError | None = None
        self._first, self._over = asyncio.Event(), asyncio.Event()
        self._request: InferenceRequest | None = None
        try:
            now = time.monotonic_ns()
            self._request = sample.sent_to(running, self, now, tokens=tokens, timeout_us=timeout_us)
        except NeriteError as error:
            self._error = error.without_frames()
            self._over.set()
            return
        running.submit(self._request)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Record a response."""
        if response.error is not None:
            self._error = response.error.without_frames()
        elif response.header is not None and response.header.outputs:
            if not self._times:
                self._outputs = tuple(
                    f"{spec.name} {spec.datatype.name} {shape_text(spec.shape)}" for spec in response.header.outputs
                )
            self._times.append(time.monotonic() - self._began)
        self._first.set()
        if final:
            self._request = None  # whose sink this is: they would keep each other
            self._over.set()

    async def outcome(self, seconds: float) -> TrialOutcome:
        """Wait for the last response; after ``seconds`` the request is cancelled."""
        ended = await _reached(self._over, seconds)
        if not ended and self._request is not None:
            self._request.cancel()
        first = self._times[0] if self._times else 0.0
        last = self._times[-1] if self._times else 0.0
        return TrialOutcome(ended, self._error, len(self._times), first, last, self._outputs)

    async def cancelled(self, limits: TrialLimits, *, streams: bool) -> TrialOutcome:
        """Cancel the request when it is under way, and return how it ended."""
        until = self._began + limits.answer
        if streams:
            await _reached(self._first, limits.answer)
        while self._request is not None and not streams and time.monotonic() < until:
            if self._over.is_set() or self._running.begun(self._request):
                break
            await asyncio.sleep(_STEP)
        if self._request is not None:
            self._request.cancel()
        return await self.outcome(limits.cancel)


async def _reached(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def trial_differences(
    baseline: RunningVersion, candidate: RunningVersion, samples: Sequence[TrialSample], limits: TrialLimits
) -> Sequence[Difference]:
    """Send requests to both and return what differs. ``samples`` fit the signature of the baseline.

    The first one that the baseline answers is used, because only some sizes may suit it; otherwise the first of all.
    """
    before, sample = await _answered(baseline, samples, limits)
    after = await TrialRequest(candidate, sample, tokens=_FEW_TOKENS).outcome(limits.answer)
    found = [*_answers(before, after, sample.origin, limits)]
    streams = candidate.decoupled or candidate.generates
    if after.ended and after.error is None:
        if streams:
            found += _streams(before, after)
        if stuck := await _cancellation(candidate, sample, limits, streams=streams):
            return [*found, *stuck]
        if candidate.generates:
            found += await _deadline(candidate, sample, limits)
    return found


async def _answered(
    baseline: RunningVersion, samples: Sequence[TrialSample], limits: TrialLimits
) -> tuple[TrialOutcome, TrialSample]:
    outcomes = []
    for sample in samples:
        outcome = await TrialRequest(baseline, sample, tokens=_FEW_TOKENS).outcome(limits.answer)
        outcomes.append((outcome, sample))
        if outcome.ended and outcome.error is None:
            return outcome, sample
        if not isinstance(outcome.error, _OF_SIZES):
            break
    return outcomes[0]


def _answers(before: TrialOutcome, after: TrialOutcome, origin: str, limits: TrialLimits) -> Sequence[Difference]:
    subject = f"an inference ({origin})"
    works = before.ended and before.error is None
    if not after.ended:
        text = f"The candidate does not answer within {limits.answer:g} s."
        return [blocks(subject, before, after, text) if works else warns(subject, before, after, text)]
    if after.error is not None:
        if works:
            return [blocks(subject, before, after, "The candidate fails where the baseline answers.")]
        text = "Neither answers it, so nothing was tried: add a sample to model_warmup that the model accepts."
        return [warns(subject, before, after, text)]
    if not works:
        return [notes(subject, before, after, "Only the candidate answers it.")]
    if before.outputs != after.outputs:
        text = "The same request gets outputs of another form."
        return [warns(f"outputs of {subject}", ", ".join(before.outputs), ", ".join(after.outputs), text)]
    return []


def _streams(before: TrialOutcome, after: TrialOutcome) -> Sequence[Difference]:
    if before.responses > 1 and after.responses <= 1:
        text = "The candidate answers in one piece: clients that show text as it comes wait for the end."
        return [blocks("streaming", before, after, text)]
    if _all_at_once(after) and before.responses > 1 and not _all_at_once(before):
        text = "The candidate's responses come all at once at the end: the time to the first token is worse."
        return [warns("streaming", before, after, text)]
    if before.responses != after.responses and before.responses:
        return [notes("streaming", before, after, "The same request gets another number of responses.")]
    return []


def _all_at_once(outcome: TrialOutcome) -> bool:
    return outcome.responses > 1 and outcome.last - outcome.first < outcome.last * _ALL_AT_ONCE


async def _cancellation(
    candidate: RunningVersion, sample: TrialSample, limits: TrialLimits, *, streams: bool
) -> Sequence[Difference]:
    """Cancel a request that is under way; return what happens if the instance does not come back."""
    ended = await TrialRequest(candidate, sample, tokens=_MANY_TOKENS).cancelled(limits, streams=streams)
    if not ended.ended:
        text = f"A cancelled request still occupies its instance after {limits.cancel:g} s: disconnects pile up."
        return [blocks("cancellation", "not tried", "the request does not end", text)]
    again = await TrialRequest(candidate, sample, tokens=_FEW_TOKENS).outcome(limits.answer)
    if not again.ended or again.error is not None:
        text = "After a request was cancelled, the instance answers no other."
        return [blocks("cancellation", "not tried", again, text)]
    return []


async def _deadline(candidate: RunningVersion, sample: TrialSample, limits: TrialLimits) -> Sequence[Difference]:
    seconds = _DEADLINE_US / 1e6
    asked = TrialRequest(candidate, sample, tokens=_MANY_TOKENS, timeout_us=_DEADLINE_US)
    if (await asked.outcome(seconds + limits.cancel)).ended:
        return []
    text = f"A request is not ended {limits.cancel:g} s after its deadline: its client has long given up."
    return [blocks("deadline", "not tried", f"passed by {limits.cancel:g} s", text)]
