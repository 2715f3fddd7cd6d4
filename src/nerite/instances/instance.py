"""Interface of the instances of models, and what instances of all kinds share.

Shared are: the policy for brief executions, readiness checks, the current span, and the call of a model's code.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes, TraceContext, context_of
from nerite.core.failures import message_of, traceback_of
from nerite.core.request import InferenceRequest, at_hand
from nerite.core.response import InferenceResponse
from nerite.observability.custom_metrics import ReportedMetrics

Batch: TypeAlias = list[InferenceRequest]

Done: TypeAlias = Callable[["ModelInstance", Batch, Sequence[InferenceResponse | None], ExecutionTimes | None], None]
"""Called on the loop's thread with one response per request, None for a request that is answered through ``Part``.

``ExecutionTimes`` is None if the model never ran.
"""
Part: TypeAlias = Callable[[InferenceRequest, InferenceResponse, bool, ExecutionTimes | None], None]
"""Called on the loop's thread with one of several responses to a request, and whether it is the last: before ``Done``,
while other batches run, or after the instance is closed.

``ExecutionTimes`` has the start of the execution, the start of the computation of this response (as
``inputs_ready_ns``), and when it was computed and sent. It is None for the error of a worker that died.
"""
OnReport: TypeAlias = Callable[["ModelInstance", EngineReport | None], None]
"""Called on the loop's thread with a report of an engine, before the responses that the report covers.

None: the engine is gone, and the requests that it had will be answered with an error.
"""


class ModelInstance(Protocol):
    """An instance of a model. Idle until ``run``, and again after it has called back.

    With ``ahead`` it takes a second batch while the first runs, and starts it when that ends.

    ``usable`` is False while it cannot take a batch although it runs nothing (a worker that restarts); ``on_usable`` is
    called whenever that changes, and when an attempt to restart it failed. ``failure`` is the error of the last such
    attempt, None if it succeeded. ``restarts`` counts the successful ones.

    ``on_lost`` is called with requests that are about to be answered with an error, because their worker is lost.

    With ``traced`` the model gets the trace contexts of its requests.

    ``metrics`` are those that the models in its process count themselves, None if that process is the server.

    ``report`` is the last report of its engine, None without an engine that reports.
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
    on_lost: Callable[[Sequence[InferenceRequest]], None]

    @property
    def busy(self) -> bool:
        """Whether a batch, or a request that gets its responses one by one, is in progress."""

    def run(self, batch: Batch) -> None:
        """Execute a batch, and call ``done`` once, with this very list.

        Never blocks, except in instances that run on the loop by design. If it raises before ``done`` was called,
        nothing of the batch was taken and the instance is in its previous state.
        """

    def cancel(self, request: InferenceRequest) -> None:
        """Notify the model, if it cannot see it by itself, that ``request``, which it has, is cancelled."""

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Make the model wait before it sends another response to ``request``, which it has, or end that wait."""

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the unanswered calls to other models that keep the instance busy; empty if it runs no batch."""

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the unanswered calls that ``request`` depends on; None if the instance does not have it."""

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Query the model whether it can serve; ``answered`` is called on the loop's thread.

        If the model does not answer within ``patience`` seconds, its previous answer is used.
        """

    def memory(self) -> int:
        """Return the private memory of its process in bytes; 0 for an instance without a process of its own."""

    def process(self) -> tuple[int, float] | None:
        """Return the id and start time of its process; None if it has none besides the server's."""

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model and release everything; ``closed`` is called once, on the loop's thread."""


# Brief executions: decides whether an instance's executions are so brief that the loop runs them itself. Pure.
#
# Handing a batch to a thread and taking the result back costs two wake-ups and contention for the GIL, about 0.1 ms on
# two cores. For a model that computes for 20 us, a small network or a tree, that is five times the work. The duration
# is not known in advance, so a model starts in its thread; after a run of executions that may be brief the loop takes
# over. The thread's processor time shows that for each of them. Alone it would mislead for frameworks that compute in
# threads of their own while ours waits, as OpenVINO does with several streams, so the shortest of the run has to be
# brief by the wall clock, too.
#
# On the loop the time includes no wait for the GIL, and no cold cache. Executions that are not brief add up to a debt
# that brief ones pay back; a single one never counts for more than a quarter of it, as any may be delayed by other load
# on the machine. When the debt reaches its limit the model returns to its thread, for twice as long as the last time.
# So a model that is brief only now and then stays in its thread, and delays the loop a few times in its life.

BRIEF_NS: Final = 70_000
"""An execution shorter than this is better run on the loop."""
MAX_NS: Final = 4 * BRIEF_NS
"""Longer executions count as this long."""
DEBT_NS: Final = 4 * (MAX_NS - BRIEF_NS)
"""Limit of the debt: the time that executions on the loop may take in total beyond ``BRIEF_NS`` each."""
_COLD: Final = 2
"""In a thread that was woken for it, the same computation takes up to this many times longer."""
_WAIT_NS: Final = 5_000_000
_FIRST: Final = 8
_LONGEST: Final = 1 << 20


class BriefExecutionPolicy:
    """Execution history of one instance. ``on_loop`` says whether its next execution belongs on the loop."""

    __slots__ = ("_debt", "_needed", "_run", "_shortest_ns", "on_loop")

    def __init__(self) -> None:
        self.on_loop = False
        self._needed = _FIRST
        self._run = 0
        self._shortest_ns = _WAIT_NS
        self._debt = 0

    def ran_in_thread(self, computed_ns: int, took_ns: int) -> None:
        """Record an execution that took ``computed_ns`` of its thread's processor time and ``took_ns`` of wall time.

        Much of the latter may be waiting for the GIL, but hardly in all executions of a run.
        """
        if computed_ns < BRIEF_NS * _COLD and took_ns < _WAIT_NS:
            self._run += 1
            self._shortest_ns = min(self._shortest_ns, took_ns)
        else:
            self._run = 0
            self._shortest_ns = _WAIT_NS
        self.on_loop = self._run >= self._needed and self._shortest_ns < BRIEF_NS * _COLD

    def ran_on_loop(self, took_ns: int) -> None:
        """Record an execution that blocked the loop."""
        self._debt = max(0, self._debt + min(took_ns, MAX_NS) - BRIEF_NS)
        if self._debt >= DEBT_NS:
            self._debt = self._run = 0
            self._shortest_ns = _WAIT_NS
            self.on_loop = False
            self._needed = min(self._needed * 2, _LONGEST)


# Readiness of instances: queried from each model, answered at once or from the last answer, and combined into one.

Answered: TypeAlias = Callable[[bool], None]

PROBE_PATIENCE: Final = 0.5
"""Seconds that a probe waits for a model's own check, half of what Kubernetes allows. Then the last answer counts."""
CHECK_PATIENCE: Final = 5.0
"""Seconds that an idle model has for its own check. If it takes longer the model is not ready, whatever it answers."""


class ReadinessCheck:
    """A model's own readiness check, in a worker that may be busy. For the loop's thread only.

    Overlapping checks are coalesced: a check that starts while one is in progress gets the result of that one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[Answered], None]) -> None:
        """``ask`` sends the query to the model; the answer comes in time, late, or never."""
        self._loop = loop
        self._ask = ask
        self._ready = False
        self._asked_at: float | None = None
        """Time of the query that is not answered yet."""
        self._waiting: list[Answered] = []

    def check(self, answered: Answered, patience: float, *, executing: bool) -> None:
        """Answer within ``patience`` seconds, with the last answer if no new one has come by then.

        While the instance is ``executing`` the last answer counts, because the model's code is not reentrant.
        """
        if executing:
            answered(self._ready)
            return
        if self._asked_at is None:
            self._asked_at = self._loop.time()
            self._waiting.append(answered)
            self._ask(self._answer)
        elif self._overdue:
            self._ready = False
            answered(False)
            return
        else:
            self._waiting.append(answered)
        if answered in self._waiting:
            self._loop.call_later(patience, self._late, answered)

    def refresh(self) -> None:
        """Query the model, so that an answer is known by the time of the first probe."""
        self.check(_ignored, CHECK_PATIENCE, executing=False)

    def lost(self) -> None:
        """Answer all pending checks with False: the worker, and the query in it, are gone."""
        self._answer(False)

    @property
    def _overdue(self) -> bool:
        return self._asked_at is not None and self._loop.time() - self._asked_at > CHECK_PATIENCE

    def _answer(self, ready: bool) -> None:
        ready = ready and not self._overdue  # otherwise a slow check would be ready and not ready in turns
        self._ready, self._asked_at = ready, None
        waiting, self._waiting = self._waiting, []
        for answered in waiting:
            answered(ready)

    def _late(self, answered: Answered) -> None:
        if answered in self._waiting:
            self._waiting.remove(answered)
            answered(self._ready)


def _ignored(_ready: bool) -> None:
    """Do nothing: the answer is stored."""


def all_ready(asked: Collection[Callable[[Answered], None]], answered: Answered) -> None:
    """Query all side by side, and answer once, after the last: True if all can serve, or if the collection is empty."""
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


# The current span of an execution, for models that use OpenTelemetry themselves.
#
# A batch may have requests of several traces. The span is that of the first request that is traced.

_API = "opentelemetry.trace"


def current_span_of(batch: Iterable[InferenceRequest]) -> TraceContext | None:
    """Return the span of a batch; None if OpenTelemetry is not imported in this process."""
    if _API not in sys.modules:
        return None
    return next((context for request in batch if (context := context_of(request)) is not None), None)


def enter_span(context: TraceContext) -> Any:
    """Make a span current; return the argument for ``leave_span``, None if OpenTelemetry's API is not imported."""
    trace = sys.modules.get(_API)
    if trace is None:
        return None
    from opentelemetry.context import attach  # always installed along with the API

    span = trace.SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        trace_state=trace.TraceState.from_header([context.state] if context.state else []),
    )
    return attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))


def leave_span(entered: Any) -> None:
    """Restore the span that was current before."""
    from opentelemetry.context import detach

    detach(entered)


# Execution: the one place that calls a model's code and turns its exceptions into responses.

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
    """Execute a batch; always return one response per request, whatever the model does.

    None stands for a request that the model answers by itself. An exception fails the whole batch: a ``NeriteError``
    with its own text, anything else as ``Internal``, with the traceback in the log only. ``span`` is current while the
    model's code runs. ``contained``: the model runs in the server's process, where ``sys.exit`` only fails its batch.
    """
    before = at_hand.set(requests)
    entered = None if span is None else enter_span(span)
    try:
        responses: list[InferenceResponse | None] = list(instance.execute(requests, timings))
        if len(responses) != len(requests):
            raise Internal(f"instance '{name}' returned {len(responses)} responses for {len(requests)} requests")
    except BaseException as error:
        if not (contained or isinstance(error, Exception)):
            raise
        responses = failed_batch(error, name, requests, timings)
    if entered is not None:
        leave_span(entered)
    at_hand.reset(before)
    timings.end()
    return responses


def failed_batch(
    error: BaseException, name: str, requests: Sequence[InferenceRequest], timings: ExecutionTimes
) -> list[InferenceResponse | None]:
    """Return the responses to a batch whose execution has raised ``error``; log it if it is unforeseen."""
    timings.failed = True
    if isinstance(error, NeriteError):
        return [InferenceResponse.failed(error.without_frames())] * len(requests)
    _log.error("instance '%s' failed\n%s", name, traceback_of(error))
    failure = Internal(f"{type(error).__name__}: {message_of(error)}")
    return [InferenceResponse.failed(failure)] * len(requests)


@runtime_checkable
class OverlappingInstance(Instance, Protocol):
    """An instance that can begin a batch while an earlier one is not finished."""

    def begin(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Callable[[], Sequence[InferenceResponse | None]]:
        """Begin a batch; return what finishes it, to be called once, by another thread. Raises as ``execute``."""
