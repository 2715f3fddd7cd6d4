"""The times of one execution."""

from __future__ import annotations

import time

from nerite.core.request import InferenceRequest, ReplySink
from nerite.core.trace_context import TraceContext


class ExecutionTimes:
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


# A sink that also wants to know how its request ran: a trace, an ensemble that adds up what its steps took.


class ExecutionObserver:
    """Told by the scheduler, on the loop's thread, before the answer that the news are about is passed on."""

    __slots__ = ()

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Take note of the execution. ``timings`` is None if the worker died. Responses may be still to come."""

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Take note of an execution after which the request waits to run once more."""

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Take note that an ensemble is done. ``timings`` has the sums over its steps; None: it failed."""

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Take note of one of several responses; ``timings`` as in ``Part``. Sooner or later comes ``ran`` as well."""

    @property
    def trace(self) -> object:
        """What notes how the request runs, None where nobody does. Said by whoever stands before it, too."""
        return None

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return where the request stands in a trace: see ``trace_context``."""
        return None


class ForwardingSink(ExecutionObserver):
    """A sink before another one, which gets the news if it wants them. Responses are the business of who derives."""

    __slots__ = ("_sink",)

    def __init__(self, sink: ReplySink) -> None:
        self._sink = sink

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.ran(request, timings)

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.turned(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.composed(request, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.parted(request, timings)

    @property
    def trace(self) -> object:
        """Return what the sink says."""
        return getattr(self._sink, "trace", None)

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return what the sink says."""
        return self._sink.context_of(request) if isinstance(self._sink, ExecutionObserver) else None
