"""Traces of requests: which are made, and where they go.

A trace stands between a request and its sink, so it sees each response leave; the dispatcher tells it of the execution.
A model of which nothing is traced knows nothing of all this.
"""

from __future__ import annotations

from collections.abc import Callable

from nerite.config.options import TraceOptions
from nerite.core.model_calls import CallRequest, ChildRequest
from nerite.core.request import InferenceRequest
from nerite.core.trace_context import TraceContext
from nerite.observability.otlp_exporter import Exporter
from nerite.observability.trace import OtelTrace, Sampler, Trace, TraceSettings
from nerite.observability.trace_file import TraceFile, trace_json


class Tracing:
    """The traces of a server."""

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called when other settings hold."""
        self.settings = TraceSettings(options, self._settings_changed)
        self._changed = changed
        self._file = TraceFile(options.file)
        self._exporter = Exporter(options.opentelemetry, _exemplify) if options.mode == "opentelemetry" else None
        self._kind = Trace if self._exporter is None else OtelTrace
        self._next = 1

    @property
    def exports(self) -> bool:
        """Whether traces have ids that others know."""
        return self._exporter is not None

    def wants(self, model: str) -> bool:
        """Return whether requests of a model may be traced."""
        return not self.settings.levels.isdisjoint(self.settings.sampler(model).values.levels)

    def begin(self, request: InferenceRequest, version: int, sampler: Sampler) -> None:
        """Trace a request that is about to be queued, if its turn has come: of a step of an ensemble, its parent's.

        ``sampler`` is the one that its model has as long as the settings are what they are. A request that comes with
        the context of a trace is traced if that is, whether it is its turn or not. Others are not while the exporter
        has more than it can send.
        """
        if request.caused:
            assert isinstance(request, ChildRequest)
            parent = getattr(request.parent.sink, "trace", None)
            if isinstance(parent, Trace):
                self._begin_child(request, version, parent)
            return
        exporter = self._exporter
        outer: TraceContext | None = None if exporter is None else getattr(request.sink, "outer_span", None)
        if outer is None:
            if sampler.choose() and (exporter is None or exporter.has_room()):
                self._begin(request, version, sampler)
        elif outer.sampled:
            trace = self._begin(request, version, sampler)
            assert isinstance(trace, OtelTrace)
            trace.begin_under(outer.trace_id, outer.span_id, outer.state)

    def _begin(self, request: InferenceRequest, version: int, sampler: Sampler) -> Trace:
        sampler.open += 1
        trace = request.sink = self._kind(request, version, self._next, sampler, self._complete)
        self._next += 1
        return trace

    def _begin_child(self, request: ChildRequest, version: int, parent: Trace) -> None:
        trace = self._begin(request, version, parent.sampler)
        trace.parent = parent.number
        if isinstance(trace, OtelTrace) and isinstance(parent, OtelTrace):
            # A call is made while its parent is executed.
            called = isinstance(request, CallRequest)
            span = parent.compute_span(len(parent.executions)) if called else parent.model_span
            trace.begin_under(parent.trace_id, span, parent.state)

    def close(self) -> None:
        """Write what is there, or send it."""
        self._file.write()
        if self._exporter is not None:
            self._exporter.close()

    def _settings_changed(self) -> None:
        self._file.write()
        self._changed()

    def _complete(self, trace: Trace) -> None:
        sampler = trace.sampler
        sampler.open -= 1
        trace.let_go()
        if self._exporter is not None:
            assert isinstance(trace, OtelTrace)
            self._exporter.add(trace)
            return
        values = sampler.values
        self._file.add(trace_json(trace), values.log_frequency, last=values.count == 0 and not sampler.open)


def _exemplify(trace: OtelTrace, epoch: int) -> None:
    """Have the histograms refer to a trace that leaves. On the exporter's thread."""
    route = trace.header.route
    if trace.error is None and route is not None:
        route.version.traced_one(trace.final_ns - trace.received_ns, trace.trace_id, epoch + trace.final_ns)
