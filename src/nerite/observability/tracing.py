"""Creates the traces of requests, and passes complete ones to the trace file or the exporter.

A trace is a sink in front of the request's sink, so it sees each response, and the dispatcher reports executions to it.
Requests of models that are not traced incur no cost.
"""

from __future__ import annotations

from collections.abc import Callable

from nerite.config.options import TraceOptions
from nerite.core.execution_observer import TraceContext
from nerite.core.model_calls import CallRequest, ChildRequest
from nerite.core.request import InferenceRequest
from nerite.observability.otlp import Exporter
from nerite.observability.trace import OtelTrace, Sampler, Trace, TraceSettings
from nerite.observability.trace_file import TraceFile, trace_json


class Tracing:
    """The traces of a server."""

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called when settings have changed."""
        self.settings = TraceSettings(options, self._settings_changed)
        self._changed = changed
        self._file = TraceFile(options.file)
        self._exporter = Exporter(options.opentelemetry, _add_exemplar) if options.mode == "opentelemetry" else None
        self._kind = Trace if self._exporter is None else OtelTrace
        self._next = 1

    @property
    def exports(self) -> bool:
        """Whether traces are sent to a collector, so that their ids can be looked up."""
        return self._exporter is not None

    def wants(self, model: str) -> bool:
        """Return whether requests of a model may be traced."""
        return not self.settings.levels.isdisjoint(self.settings.sampler(model).values.levels)

    def begin(self, request: InferenceRequest, version: int, sampler: Sampler) -> None:
        """Trace a request that is about to be queued, if ``sampler`` chooses it.

        Steps of ensembles and calls of models are traced with their parent. A request with a trace context is traced
        if the context is sampled. Other requests are not traced while the queue of the exporter is full.
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
            # A model makes calls while it is executed.
            called = isinstance(request, CallRequest)
            span = parent.compute_span(len(parent.executions)) if called else parent.model_span
            trace.begin_under(parent.trace_id, span, parent.state)

    def close(self) -> None:
        """Write or send the remaining traces."""
        self._file.write()
        if self._exporter is not None:
            self._exporter.close()

    def _settings_changed(self) -> None:
        self._file.write()
        self._changed()

    def _complete(self, trace: Trace) -> None:
        sampler = trace.sampler
        sampler.open -= 1
        trace.release()
        if self._exporter is not None:
            assert isinstance(trace, OtelTrace)
            self._exporter.add(trace)
            return
        values = sampler.values
        self._file.add(trace_json(trace), values.log_frequency, last=values.count == 0 and not sampler.open)


def _add_exemplar(trace: OtelTrace, epoch: int) -> None:
    """Add a sent trace to the histograms as an exemplar. Called on the exporter's thread."""
    if trace.error is None and trace.header.route is not None:
        trace.header.route.version.traced_one(
            trace.final_ns - trace.received_ns, trace.trace_id, epoch + trace.final_ns
        )
