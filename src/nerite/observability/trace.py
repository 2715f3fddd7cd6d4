"""What happened to one request: a trace stands between it and its sink, and keeps the times.

Nothing is written or built here: that is done with traces that are complete, many at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, TypeAlias

from nerite.config.options import OpenTelemetryOptions, TraceOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes, ForwardingSink
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec, to_array
from nerite.core.trace_context import TraceContext

# What is traced: settings of the server, and of single models over them.
#
# There are three layers: how the server was started, what clients set since for all models, and what they set for one
# model. A setting that a layer does not have comes from the layer below. An update changes all that it names, or
# nothing.
#
# A layer in which something is set has a ``Sampler`` of its own: its rate and its count are for its requests alone.

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
Update: TypeAlias = Mapping[str, Any]
"""Fields of ``TraceValues`` by name; None has the layer below decide again."""


@dataclass(frozen=True)
class TraceValues:
    """A value of every setting that can be changed."""

    levels: frozenset[str]
    """Of ``LEVELS``; empty is off."""
    rate: int
    count: int
    """Traces that are still to be made, -1 for any number."""
    log_frequency: int


class Sampler:
    """Chooses which requests of a layer are traced."""

    __slots__ = ("_until_next", "open", "tensors", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        """With what is left of ``count``."""
        self.tensors = "TENSORS" in values.levels
        """Whether traces have tensors."""
        self.open = 0
        """Traces that are not complete yet. The business of whoever makes them."""
        self._until_next = values.rate if values.levels and values.count else 0
        """Requests up to the next that is traced, with it. From 0 on downwards there is none."""

    def choose(self) -> bool:
        """Say of one more request whether it is traced: every ``rate``-th is, until ``count`` of them were."""
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
    """The settings, told and changed. Models are names here, loaded or not."""

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called after each update."""
        self._options = options
        self._changed = changed
        self._start = TraceValues(frozenset(options.levels), options.rate, options.count, options.log_frequency)
        self._server = Sampler(self._start)
        self._models: dict[str, Sampler] = {}
        self._set: dict[str, Update] = {}
        """What clients set, by model; the empty name is for all models."""

    @property
    def levels(self) -> frozenset[str]:
        """The levels that lead to something: spans have times alone, and records have to have a file."""
        if self._options.mode == "opentelemetry":
            return frozenset(("TIMESTAMPS",))
        return frozenset(LEVELS if self._options.file else ())

    def sampler(self, model: str) -> Sampler:
        """Return what chooses from the requests of a model; an empty name is that of none."""
        return self._models.get(model, self._server)

    def told(self, model: str) -> list[tuple[str, str | Sequence[str]]]:
        """Return all settings of a model, or of the server if ``model`` is empty, as the trace extension names them.

        All values are text; the levels are a list. ``resource`` comes as often as there are attributes.
        """
        values, options = self.sampler(model).values, self._options
        told: list[tuple[str, str | Sequence[str]]] = [
            ("trace_level", [level for level in LEVELS if level in values.levels] or ["OFF"]),
            ("trace_rate", str(values.rate)),
            ("trace_count", str(values.count)),
        ]
        if options.mode == "opentelemetry":
            return [*told, ("trace_mode", options.mode), *_exporter(options.opentelemetry)]
        told += [("log_frequency", str(values.log_frequency)), ("trace_file", options.file)]
        return [*told, ("trace_mode", options.mode)]

    def update(self, model: str, update: Update) -> None:
        """Change settings of a model, or of the server if ``model`` is empty. Raises Triton's refusals."""
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
            # A count that a model has used up does not keep the settings of the server from being changed.
            self._check(models[name].values, used_up=not model and "count" in settings[name])
        self._server, self._models = server, models
        self._set = {name: values for name, values in settings.items() if values}
        self._changed()

    def _remaining(self, model: str) -> Update:
        """Return what clients set for a model, with what is left of a count."""
        update = self._set[model]
        return {**update, "count": self.sampler(model).values.count} if "count" in update else update

    def _check(self, values: TraceValues, *, used_up: bool = False) -> None:
        """Refuse settings with which nothing could be traced although they ask for it.

        ``used_up``: a count of 0 may be what is left of one.
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
    """Return the settings of the exporter: those that were given, and the sizes of its batches always."""
    usual = OpenTelemetryOptions()
    told = [("resource", f"{k}={v}") for k, v in options.resource.items() if usual.resource.get(k) != v]
    if options.url != usual.url:
        told.append(("url", options.url))
    sizes = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
    return [*told, *((name, str(getattr(options, name))) for name in sizes)]


# Tensors as text, as traces have them.


def tensor_text(spec: TensorSpec, data: Buffer) -> dict[str, str]:
    """Return a tensor as text: elements and dimensions with commas between them, as Triton has it."""
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


_now = time.monotonic_ns


class Trace(ForwardingSink):
    """Takes the place of the sink of a request. There is one for each that is traced: it only notes."""

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
        """``complete`` is called once nothing more can happen."""
        sink = request.sink
        self._sink = sink  # as the class above does
        self._complete = complete
        self._runs = self._ran = self._between = False
        self.header = request.header
        self.id = request.id
        self.version = version
        self.number = number
        self.sampler = sampler
        self.parent = 0
        """The number of the trace it belongs to, or 0."""
        self.parent_span = 0
        self.state = ""
        self.protocol: str = getattr(sink, "protocol", "")
        """Empty for what no client sent."""
        self.received_ns = request.arrived_ns
        self.first_ns: int = getattr(sink, "began_ns", 0) or request.arrived_ns
        """When the first of the request was here. Mostly it is one piece."""
        self.began_ns = _now()
        self.executions: list[tuple[int, ExecutionTimes | None]] = []
        """Since when the request waited for each of them, and its times."""
        self.last_part: ExecutionTimes | None = None
        """The times of the last of several responses."""
        self.sends: list[int] = []
        """When the writing of each response began and ended."""
        self.answered_ns = self.final_ns = self.ended_ns = 0
        """When the first response was here, the last, and when it was known how the request ran. 0: not at all."""
        self.error: NeriteError | None = None
        self.attributes: dict[str, Any] | None = None
        """What whoever sent the request has to say of it."""
        self.tensors: list[tuple[int, str, dict[str, str]]] | None = None
        if sampler.tensors:
            self.tensors = []
            self._note_tensors("TENSOR_QUEUE_INPUT", request.header.inputs, request.data)

    @property
    def trace(self) -> Trace:
        """Itself: whoever stands before it passes this on."""
        return self

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and note it."""
        now = _now()
        if not self.answered_ns:
            self.answered_ns = now
        if response.error is not None:
            self.error = response.error
        elif self.tensors is not None and response.header is not None:
            self._note_tensors("TENSOR_BACKEND_OUTPUT", response.header.outputs, response.data)
            now = _now()
        self._sink.respond(request, response, final)
        if self.protocol and (response.header is not None or response.error is not None):
            self.sends += (now, _now())
        if final:
            self.final_ns = now
            told = getattr(self._sink, "span_attributes", None)
            if told is not None:
                self.attributes = told(request)
            if self._between:
                self.ended_ns = now
            if not self._runs:
                self._complete(self)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Take note that an instance answers: sooner or later it says how it ran."""
        self._runs = not self._ran
        self._between = False
        self.last_part = timings
        super().parted(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Note that all steps are done: each has a trace of its own, with its times."""
        super().composed(request, timings)
        self._note_end(request, None)

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Note one of several executions: who gives up before the next ends the request there."""
        super().turned(request, timings)
        self._runs, self._between = False, True
        self._note_execution(request, timings)

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Note the execution, after which there is no other."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.ran(request, timings)
        self._note_end(request, timings)

    def let_go(self) -> None:
        """Keep nothing of the request but what is noted."""
        self._sink = NOBODY

    def _note_execution(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        if timings is not None and timings.requests > 1 and timings.leader is None:
            self._lead(request, timings)
        queued_ns, began_ns = request.queued_ns, self.began_ns
        self.executions.append((queued_ns if queued_ns > began_ns else began_ns, timings))

    def _lead(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        """Have the others of a batch refer to this one, the first of it, where they can."""

    def _note_end(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        self._note_execution(request, timings)
        self._ran = True
        self._runs = self._between = False
        self.ended_ns = _now()
        if self.final_ns:
            self._complete(self)

    def _note_tensors(self, activity: str, specs: Iterable[TensorSpec], data: Iterable[Buffer]) -> None:
        if self.tensors is not None:
            for spec, buffer in zip(specs, data, strict=False):
                self.tensors.append((_now(), activity, tensor_text(spec, buffer)))


# A trace that becomes spans of OpenTelemetry.

_SPANS: Final = 2
"""The first spans of a trace: the request, and the model. Two for each execution follow: the queue, and the compute."""
USUAL_SPANS: Final = _SPANS + 2
"""What a trace becomes whose request runs once."""
_COUNTED_BITS: Final = 20
"""Of the id of a span: which span of a request it is. The rest is by chance."""
_random: Final = Random()  # of our own: a model in this process may have seeded the common one


class OtelTrace(Trace):
    """Has ids once somebody asks for them: most often that is when the spans are made."""

    _trace_id = _span_id = 0

    @property
    def trace_id(self) -> int:
        """The id of the whole, which may have begun elsewhere."""
        if not self._trace_id:
            self._trace_id = _random.getrandbits(128) | 1
        return self._trace_id

    @property
    def span_id(self) -> int:
        """The id of the first span. Those of the others follow."""
        if not self._span_id:
            self._span_id = (_random.getrandbits(64 - _COUNTED_BITS) | 1) << _COUNTED_BITS
        return self._span_id

    def begin_under(self, trace_id: int, span_id: int, state: str) -> None:
        """Go on with a trace, under this span of it."""
        self._trace_id, self.parent_span, self.state = trace_id, span_id, state

    def context_of(self, request: InferenceRequest) -> TraceContext:
        """Return the span of the execution that is under way, or comes next; of the last, once that is known."""
        return TraceContext(self.trace_id, self.compute_span(len(self.executions) - self._ran), self.state)

    def _lead(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        timings.leader = self.context_of(request)

    @property
    def model_span(self) -> int:
        """The id of the span of the model."""
        return self.span_id + 1

    def queue_span(self, execution: int) -> int:
        """Return the id of the span of the wait before an execution, counted from 0."""
        return self.span_id + _SPANS + 2 * execution

    def compute_span(self, execution: int) -> int:
        """Return the id of the span of an execution, counted from 0."""
        return self.span_id + _SPANS + 2 * execution + 1

    @property
    def spans(self) -> int:
        """How many spans it becomes."""
        return _SPANS + 2 * len(self.executions)
