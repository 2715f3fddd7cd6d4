"""Something that runs batches of one model: an instance, wherever it lives."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import message_of, traceback_of
from nerite.core.request import InferenceRequest, at_hand
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext, context_of
from nerite.observability.custom_metrics import ReportedMetrics

Batch: TypeAlias = list[InferenceRequest]

Done: TypeAlias = Callable[["ModelInstance", Batch, Sequence[InferenceResponse | None], ExecutionTimes | None], None]
"""Called on the loop's thread with one answer a request, None for one that is answered by ``Part``.

``ExecutionTimes`` is None if the model never got to run.
"""
Part: TypeAlias = Callable[[InferenceRequest, InferenceResponse, bool, ExecutionTimes | None], None]
"""Called on the loop's thread with one of several responses to a request, and whether it is the last: before ``Done``,
while other batches run, after the runner is closed.

``ExecutionTimes`` has the start of the execution, when the computing of this response began (as ``inputs_ready_ns``),
and when it was computed and sent. It is None for the error of a worker that died.
"""
OnReport: TypeAlias = Callable[["ModelInstance", EngineReport | None], None]
"""Called on the loop's thread with what an engine says of itself, before the responses that it tells of.

None: the engine is gone, and what it had will be answered with an error.
"""


class ModelInstance(Protocol):
    """An instance of a model. Idle until ``run``, and again when it has called back.

    With ``ahead`` it takes a second batch while the first runs, and starts it when that ends.

    ``usable`` is False while it cannot take a batch, though nothing runs in it (a worker that restarts);
    ``on_usable`` is called whenever that changes, and when an attempt to restart it failed. ``failure`` says why the
    last such attempt failed, and is None if it did not. ``restarts`` counts those that succeeded.

    With ``traced`` the model is told where the requests stand in their traces.

    ``metrics`` are those that the models in its process count themselves, None where that is the server's.

    ``report`` is the last one of its engine, None where there is none, or no engine that reports.
    """

    name: str
    metrics: ReportedMetrics | None
    ahead: bool
    usable: bool
    failure: NeriteError | None
    restarts: int
    done: Done
    part: Part
    traced: bool
    report: EngineReport | None
    on_report: OnReport
    on_usable: Callable[[ModelInstance], None]

    @property
    def busy(self) -> bool:
        """A batch or a request that gets its responses one by one is under way."""

    def run(self, batch: Batch) -> None:
        """Execute a batch, and call ``done`` once, with this very list.

        Never blocks, except where running on the loop is the idea. If it raises before ``done`` was called, nothing of
        the batch was taken: the instance is as it was before.
        """

    def cancel(self, request: InferenceRequest) -> None:
        """Tell the model, where it cannot see it, that ``request``, which it has, is cancelled."""

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Have the model wait, or wait no more, before it sends another response to ``request``, which it has."""

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the calls to other models before which the instance will not be free; none if it runs no batch."""

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the calls before which ``request`` will not be answered; None if the instance does not have it."""

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Ask the model itself whether it can serve; ``answered`` is called on the loop's thread.

        After ``patience`` seconds it is called with what the model said before.
        """

    def memory(self) -> int:
        """Return how many bytes its process has for itself now: 0 for an instance without a process of its own."""

    def process(self) -> tuple[int, float] | None:
        """Return the number of the process that it has now besides the server's, and when that began; None: none."""

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model and give everything back; ``closed`` is called once, on the loop's thread."""


# Whether an instance's executions are so brief that the loop runs them itself. Pure.
#
# Handing a batch to a thread and taking the answer back costs two wake-ups and a fight for the GIL, about 0.1 ms on
# two cores. For a model that computes for 20 us, a small network or a tree, that is five times the work. Nobody knows
# before how long a model takes, so it begins in its thread; after a run of executions that may be brief the loop
# takes over. Processor time tells that of each of them. That alone would be wrong for frameworks that compute in
# threads of their own while ours waits, as OpenVINO does with several streams, so the shortest of the run has to be
# brief by the clock, too.
#
# On the loop no wait for the GIL is in the time, and no cold cache. Executions that are not brief add up to a debt
# that brief ones pay back; a single one never counts for more than a quarter, as any may be held up by what else the
# machine does. Where the debt is full the model returns to its thread, for twice as long as the last time. So a model
# that is brief only now and then stays in its thread, and holds up the loop a few times in its life.

BRIEF_NS: Final = 70_000
"""An execution of less is better run on the loop."""
MOST_NS: Final = 4 * BRIEF_NS
"""An execution of more counts for so much."""
DEBT_NS: Final = 4 * (MOST_NS - BRIEF_NS)
"""Where the debt is full: what the executions on the loop may take together beyond ``BRIEF_NS`` each."""
_COLD: Final = 2
"""In a thread, woken for it, the same computation takes up to so many times longer."""
_WAIT_NS: Final = 5_000_000
_FIRST: Final = 8
_LONGEST: Final = 1 << 20


class BriefExecutionPolicy:
    """The history of one instance. ``on_loop`` says where its next execution belongs."""

    __slots__ = ("_debt", "_needed", "_run", "_shortest_ns", "on_loop")

    def __init__(self) -> None:
        self.on_loop = False
        self._needed = _FIRST
        self._run = 0
        self._shortest_ns = _WAIT_NS
        self._debt = 0

    def ran_in_thread(self, computed_ns: int, took_ns: int) -> None:
        """Note an execution that used ``computed_ns`` of its thread's processor time, and ``took_ns`` in all.

        Much of the latter may be waiting for the GIL, but hardly in all of a run.
        """
        if computed_ns < BRIEF_NS * _COLD and took_ns < _WAIT_NS:
            self._run += 1
            self._shortest_ns = min(self._shortest_ns, took_ns)
        else:
            self._run = 0
            self._shortest_ns = _WAIT_NS
        self.on_loop = self._run >= self._needed and self._shortest_ns < BRIEF_NS * _COLD

    def ran_on_loop(self, took_ns: int) -> None:
        """Note an execution during which everything else waited."""
        self._debt = max(0, self._debt + min(took_ns, MOST_NS) - BRIEF_NS)
        if self._debt >= DEBT_NS:
            self._debt = self._run = 0
            self._shortest_ns = _WAIT_NS
            self.on_loop = False
            self._needed = min(self._needed * 2, _LONGEST)


# Whether instances can serve: asked of each, answered at once or from the last answer, and joined to one.

Answered: TypeAlias = Callable[[bool], None]

PROBE_PATIENCE: Final = 0.1
"""Seconds that a probe waits for a model's own check; then the last answer counts."""
CHECK_PATIENCE: Final = 5.0
"""Seconds that a model has for its own check while it executes nothing; then it is not ready."""


class ReadinessCheck:
    """A model's own check of whether it can serve, in a worker that may be busy. For the loop's thread only.

    Checks that overlap are one check: who asks while one is under way gets its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[Answered], None]) -> None:
        """``ask`` sends the question; it is answered in time, late, or never."""
        self._loop = loop
        self._ask = ask
        self._ready = False
        self._asked_at: float | None = None
        """When the question was sent that is not answered yet."""
        self._waiting: list[Answered] = []

    def check(self, answered: Answered, patience: float, *, executing: bool) -> None:
        """Answer within ``patience`` seconds: with the last answer if there is no new one by then.

        While the instance is ``executing`` the last answer counts, as the model's code is not called a second time.
        """
        if executing:
            answered(self._ready)
            return
        now = self._loop.time()
        if self._asked_at is None:
            self._asked_at = now
            self._waiting.append(answered)
            self._ask(self._answer)
        elif now - self._asked_at > CHECK_PATIENCE:
            self._ready = False
            answered(False)
            return
        else:
            self._waiting.append(answered)
        if answered in self._waiting:
            self._loop.call_later(patience, self._late, answered)

    def refresh(self) -> None:
        """Ask, so that there is an answer by the time of the first probe."""
        self.check(_ignored, CHECK_PATIENCE, executing=False)

    def lost(self) -> None:
        """Answer all who wait with no: the worker is gone, and the question with it."""
        self._answer(False)

    def _answer(self, ready: bool) -> None:
        self._ready, self._asked_at = ready, None
        waiting, self._waiting = self._waiting, []
        for answered in waiting:
            answered(ready)

    def _late(self, answered: Answered) -> None:
        if answered in self._waiting:
            self._waiting.remove(answered)
            answered(self._ready)


def _ignored(_ready: bool) -> None:
    """Do nothing: the answer is kept."""


def all_ready(asked: Collection[Callable[[Answered], None]], answered: Answered) -> None:
    """Ask them side by side, and answer once, when the last has: True if all can, or if there are none."""
    waiting = len(asked)
    ready = True

    def one(answer: bool) -> None:
        nonlocal waiting, ready
        waiting -= 1
        ready = ready and answer
        if waiting == 0:
            answered(ready)

    if not asked:
        answered(True)
    for ask in asked:
        ask(one)


# The span of an execution, for models that use OpenTelemetry themselves: it is current while their code runs.
#
# A batch may have requests of several traces. The first of them that is traced has what the model notes.

_API = "opentelemetry.trace"


def current_span_of(batch: Iterable[InferenceRequest]) -> TraceContext | None:
    """Return the span of a batch, None where nobody here would look at it."""
    if _API not in sys.modules:
        return None
    return next((context for request in batch if (context := context_of(request)) is not None), None)


def enter_span(context: TraceContext) -> Any:
    """Make a span current; return what ``leave`` needs, None if nobody has imported OpenTelemetry's interface."""
    trace = sys.modules.get(_API)
    if trace is None:
        return None
    from opentelemetry.context import attach  # there, if the other is

    span = trace.SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        trace_state=trace.TraceState.from_header([context.state] if context.state else []),
    )
    return attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))


def leave_span(entered: Any) -> None:
    """Make current what was so before."""
    from opentelemetry.context import detach

    detach(entered)


# The one place where a model's code is called, and where what it raises becomes an answer.

_log = logging.getLogger("nerite.execution")


def run_model(
    instance: Instance,
    name: str,
    requests: Sequence[InferenceRequest],
    timings: ExecutionTimes,
    span: TraceContext | None = None,
    *,
    contained: bool = False,
) -> list[InferenceResponse | None]:
    """Execute a batch; always returns one answer for each request, whatever the model does.

    None stands for a request that the model answers by itself. An exception fails the whole batch: a ``NeriteError``
    with its own text, anything else as ``Internal``, with the traceback in the log only. ``span`` is current while the
    model's code runs. ``contained``: the model lives in the server's process, where ``sys.exit`` fails its batch, too.
    """
    before = at_hand.set(requests)
    entered = None if span is None else enter_span(span)
    try:
        responses: list[InferenceResponse | None] = list(instance.execute(requests, timings))
        if len(responses) != len(requests):
            raise Internal(f"instance '{name}' gave {len(responses)} responses to {len(requests)} requests")
    except NeriteError as error:
        timings.failed = True
        responses = [InferenceResponse.failed(error.without_frames())] * len(requests)
    except BaseException as error:
        if not (contained or isinstance(error, Exception)):
            raise
        _log.error("instance '%s' failed\n%s", name, traceback_of(error))
        timings.failed = True
        failure = Internal(f"{type(error).__name__}: {message_of(error)}")
        responses = [InferenceResponse.failed(failure)] * len(requests)
    if entered is not None:
        leave_span(entered)
    at_hand.reset(before)
    timings.end()
    return responses
