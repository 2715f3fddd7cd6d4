"""The trace of one request, and the settings that decide which requests are traced.

A trace is a sink in front of the request's sink that records timestamps. Complete traces are formatted elsewhere, many
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from nerite.config.options import OpenTelemetryOptions, TraceOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes, ForwardingSink, TraceContext
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, DeviceBuffer, TensorData, TensorSpec, to_array

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
RECEIVED: Final = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}
SENT: Final = {"HTTP": ("HTTP_SEND_START", "HTTP_SEND_END"), "GRPC": ("GRPC_SEND_START", "GRPC_SEND_END")}
COMPUTED: Final = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
"""Names of timestamps: of the request by protocol, of the responses by protocol, and of an execution."""
Update: TypeAlias = Mapping[str, Any]
"""Fields of ``TraceValues`` by name; None resets a setting to that of the layer below."""


@dataclass(frozen=True)
class TraceValues:
    """Values of all settings that can be changed."""

    levels: frozenset[str]
    """Subset of ``LEVELS``; empty means off."""
    rate: int
    count: int
    """Number of traces left to be made, -1 for unlimited."""
    log_frequency: int


class Sampler:
    """Chooses the requests that are traced: every ``rate``-th, until ``count`` of them were."""

    __slots__ = ("_until_next", "open", "tensors", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        """Settings, with the remaining ``count``."""
        self.tensors = "TENSORS" in values.levels
        """Traces include tensors."""
        self.open = 0
        """Number of incomplete traces, maintained by ``Tracing``."""
        self._until_next = values.rate if values.levels and values.count else 0
        """Number of requests up to and including the next traced one; 0 or less if there is none."""

    def choose(self) -> bool:
        """Return whether the next request is traced."""
        self._until_next -= 1
        if self._until_next:
            return False
        values = self.values
        self._until_next = values.rate
        if values.count > 0:
            self.values = replace(values, count=values.count - 1)
            if values.count == 1:
                self._until_next = 0
        return True


class TraceSettings:
    """Trace settings of the server and of single models, loaded or not.

    There are three layers: the options of the server, the settings by clients for all models, and those for one model.
    A setting that a layer lacks comes from the layer below. Each layer with settings has its own ``Sampler``, so its
    rate and count apply to its requests alone.
    """

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called after each update."""
        self._options = options
        self._changed = changed
        self._start = TraceValues(frozenset(options.levels), options.rate, options.count, options.log_frequency)
        self._server = Sampler(self._start)
        self._models: dict[str, Sampler] = {}
        self._set: dict[str, Update] = {}
        """Settings by clients, by model; the empty name is for all models."""

    @property
    def levels(self) -> frozenset[str]:
        """Levels that have an effect: spans have timestamps only, and records need a file."""
        if self._options.mode == "opentelemetry":
            return frozenset(("TIMESTAMPS",))
        return frozenset(LEVELS if self._options.file else ())

    def sampler(self, model: str) -> Sampler:
        """Return the sampler for the requests of a model; an empty name stands for all models without settings."""
        return self._models.get(model, self._server)

    def current(self, model: str) -> list[tuple[str, str | Sequence[str]]]:
        """Return the settings of a model, or of the server if ``model`` is empty, as the trace extension names them.

        Values are text; levels are a list. ``resource`` is repeated for each attribute.
        """
        values, options = self.sampler(model).values, self._options
        found: list[tuple[str, str | Sequence[str]]] = [
            ("trace_level", [level for level in LEVELS if level in values.levels] or ["OFF"]),
            ("trace_rate", str(values.rate)),
            ("trace_count", str(values.count)),
        ]
        if options.mode == "opentelemetry":
            return [*found, ("trace_mode", options.mode), *_exporter(options.opentelemetry)]
        found += [("log_frequency", str(values.log_frequency)), ("trace_file", options.file)]
        return [*found, ("trace_mode", options.mode)]

    def update(self, model: str, update: Update) -> None:
        """Change settings atomically, of a model or of the server if ``model`` is empty. Raises Triton's errors."""
        settings = {name: self._remaining(name) for name in self._set}
        merged = {**settings.get(model, {}), **update}
        settings[model] = {name: value for name, value in merged.items() if value is not None}
        if model:
            server, changed = self._server, [model]
        else:
            server = Sampler(replace(self._start, **settings[""]))
            self._check(server.values)
            changed = list(self._models)
        models = dict(self._models)
        for name in changed:
            if not settings[name]:
                models.pop(name, None)
                continue
            models[name] = Sampler(replace(server.values, **settings[name]))
            # The used-up count of a model must not prevent a change of the server's settings.
            self._check(models[name].values, used_up=not model and "count" in settings[name])
        self._server, self._models = server, models
        self._set = {name: values for name, values in settings.items() if values}
        self._changed()

    def _remaining(self, model: str) -> Update:
        """Return the settings by clients for a model, with the remaining count."""
        update = self._set[model]
        return {**update, "count": self.sampler(model).values.count} if "count" in update else update

    def _check(self, values: TraceValues, *, used_up: bool = False) -> None:
        """Raise Triton's error for settings that enable traces, but with which none could be made.

        ``used_up``: a count of 0 is valid, because it may have been used up.
        """
        if not values.levels:
            return
        reason = None
        if not values.rate:
            reason = "sample rate must be non-zero"
        elif self._options.mode == "triton" and not self._options.file:
            reason = "trace file name is not given"
        elif not values.count and not used_up:
            reason = ""
        if reason is not None:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{reason}")


def _exporter(options: OpenTelemetryOptions) -> list[tuple[str, str]]:
    """Return the settings of the exporter: batch sizes, and others if they differ from the defaults."""
    usual = OpenTelemetryOptions()
    found = [("resource", f"{k}={v}") for k, v in options.resource.items() if usual.resource.get(k) != v]
    if options.url != usual.url:
        found.append(("url", options.url))
    sizes = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
    return [*found, *((name, str(getattr(options, name))) for name in sizes)]


def tensor_text(spec: TensorSpec, data: Buffer) -> dict[str, str]:
    """Return a tensor as text, in Triton's format: elements and dimensions separated by commas."""
    return {
        "name": spec.name,
        "data": ",".join(_elements(spec, data)),
        "shape": ",".join(map(str, spec.shape)),
        "dtype": spec.datatype.name,
    }


def _elements(spec: TensorSpec, data: Buffer) -> Sequence[str]:
    try:
        array = to_array(spec, data)
    except (NeriteError, ValueError, TypeError):
        return ["?"]
    if spec.datatype is dtypes.BYTES:
        return [f'"{element.decode(errors="backslashreplace")}"' for element in array.flat]
    if spec.datatype is dtypes.BOOL:
        array = array.view("u1")
    elif spec.datatype is dtypes.BF16:
        array = (array.astype("<u4") << 16).view("<f4")
    return [str(element) for element in array.flat]


class Trace(ForwardingSink):
    """Sink of a traced request that records timestamps and passes responses on."""

    __slots__ = (
        "_between",
        "_complete",
        "_ran",
        "_runs",
        "answered_ns",
        "attributes",
        "began_ns",
        "ended_ns",
        "error",
        "executions",
        "final_ns",
        "first_ns",
        "header",
        "id",
        "last_part",
        "number",
        "parent",
        "parent_span",
        "protocol",
        "received_ns",
        "sampler",
        "sends",
        "state",
        "tensors",
        "version",
    )

    def __init__(
        self,
        request: InferenceRequest,
        version: int,
        number: int,
        sampler: Sampler,
        complete: Callable[[Trace], None],
    ) -> None:
        """``complete`` is called once, after the last event of the request."""
        sink = request.sink
        self._sink = sink  # as the base class does
        self._complete = complete
        self._runs = self._ran = self._between = False
        self.header = request.header
        self.id = request.id
        self.version = version
        self.number = number
        self.sampler = sampler
        self.parent = 0
        """Number of the parent trace, or 0."""
        self.parent_span = 0
        self.state = ""
        self.protocol: str = getattr(sink, "protocol", "")
        """Protocol; empty for requests that no client sent."""
        self.received_ns = request.arrived_ns
        self.first_ns: int = getattr(sink, "began_ns", 0) or request.arrived_ns
        """Arrival time of the first bytes of the request. Most requests arrive in one piece."""
        self.began_ns = monotonic_ns()
        self.executions: list[tuple[int, ExecutionTimes | None]] = []
        """For each execution, the time at which the request was queued, and the timestamps."""
        self.last_part: ExecutionTimes | None = None
        """Timestamps of the last of several responses."""
        self.sends: list[int] = []
        """Start and end of the writing of each response, alternating."""
        self.answered_ns = self.final_ns = self.ended_ns = 0
        """Times of the first response, the last response, and the end of the execution; 0 for none."""
        self.error: NeriteError | None = None
        self.attributes: dict[str, Any] | None = None
        """Attributes of the span, from the service that sent the request."""
        self.tensors: list[tuple[int, str, dict[str, str]]] | None = None
        if sampler.tensors:
            self.tensors = []
            self._note_tensors("TENSOR_QUEUE_INPUT", request.header.inputs, request.data)

    @property
    def trace(self) -> Trace:
        """Itself. Sinks in front of it return this, too."""
        return self

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Record a response, and pass it on."""
        now = monotonic_ns()
        if not self.answered_ns:
            self.answered_ns = now
        if response.error is not None:
            self.error = response.error
        elif self.tensors is not None and response.header is not None:
            self._note_tensors("TENSOR_BACKEND_OUTPUT", response.header.outputs, response.data)
            now = monotonic_ns()
        self._sink.respond(request, response, final)
        if self.protocol and (response.header is not None or response.error is not None):
            self.sends += (now, monotonic_ns())
        if final:
            self.final_ns = now
            told = getattr(self._sink, "span_attributes", None)
            if told is not None:
                self.attributes = told(request)
            if self.header.assignment is not None:
                route, arm, *_ = self.header.assignment
                self.attributes = {**(self.attributes or {}), "nerite.route": route, "nerite.arm": arm}
            if self._between:
                self.ended_ns = now
            elif request.queued_ns and not (self._ran or self._runs):  # it left the queue without being executed
                self._note_execution(request, None)
                self.ended_ns = now
            if not self._runs:
                self._complete(self)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Record that an instance responds: the end of its execution will be reported later."""
        self._runs = not self._ran
        self._between = False
        self.last_part = timings
        super().parted(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Record the end of an ensemble, each step of which has a trace of its own."""
        super().composed(request, timings)
        self._note_end(request, None)

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Record one of several executions. The request may be cancelled before the next one."""
        super().turned(request, timings)
        self._runs, self._between = False, True
        self._note_execution(request, timings)

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Record the last execution."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.ran(request, timings)
        self._note_end(request, timings)

    def release(self) -> None:
        """Drop the reference to the request's sink."""
        self._sink = NOBODY

    def _note_execution(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        if timings is not None and timings.requests > 1 and timings.leader is None:
            self._lead(request, timings)
        queued_ns, began_ns = request.queued_ns, self.began_ns
        self.executions.append((queued_ns if queued_ns > began_ns else began_ns, timings))

    def _lead(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        """Make this span the leader of its batch, which the others are linked to. Only spans can be."""

    def _note_end(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        self._note_execution(request, timings)
        self._ran = True
        self._runs = self._between = False
        self.ended_ns = monotonic_ns()
        if self.final_ns:
            self._complete(self)

    def _note_tensors(self, activity: str, specs: Iterable[TensorSpec], data: Iterable[TensorData]) -> None:
        if self.tensors is not None:
            for spec, buffer in zip(specs, data, strict=False):
                if not isinstance(buffer, DeviceBuffer):
                    self.tensors.append((monotonic_ns(), activity, tensor_text(spec, buffer)))


_SPANS: Final = 2
"""Spans of request and model; one for each execution follows."""
USUAL_SPANS: Final = _SPANS + 1
"""Spans of a request that is executed once."""
_COUNTED_BITS: Final = 20
"""Low bits of a span id that number the spans of a request; the other bits are random."""
_random: Final = Random()  # not the global one: a model in this process may have seeded it


class OtelTrace(Trace):
    """Trace that becomes OpenTelemetry spans. Its ids are created lazily, in most cases when it is encoded."""

    _trace_id = _span_id = 0

    @property
    def trace_id(self) -> int:
        """Trace id, which may come from the client."""
        if not self._trace_id:
            self._trace_id = _random.getrandbits(128) | 1
        return self._trace_id

    @property
    def span_id(self) -> int:
        """Id of the first span. The ids of the others follow it."""
        if not self._span_id:
            self._span_id = (_random.getrandbits(64 - _COUNTED_BITS) | 1) << _COUNTED_BITS
        return self._span_id

    def begin_under(self, trace_id: int, span_id: int, state: str) -> None:
        """Continue a trace under one of its spans."""
        self._trace_id, self.parent_span, self.state = trace_id, span_id, state

    def context_of(self, request: InferenceRequest) -> TraceContext:
        """Return the span of the current or next execution; after the end, of the last one."""
        return TraceContext(self.trace_id, self.compute_span(len(self.executions) - self._ran), self.state)

    def _lead(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        timings.leader = self.context_of(request)

    @property
    def model_span(self) -> int:
        """Id of the span of the model."""
        return self.span_id + 1

    def compute_span(self, execution: int) -> int:
        """Return the id of the ``compute`` span of an execution, counted from 0."""
        return self.span_id + _SPANS + execution

    @property
    def spans(self) -> int:
        """Number of spans."""
        return _SPANS + len(self.executions)
