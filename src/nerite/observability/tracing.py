"""Creates the traces of requests, and writes complete ones to the trace file or passes them to the exporter.

A trace is a sink in front of the request's sink, so it sees each response, and the dispatcher reports executions to it.
Requests of models that are not traced incur no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from io import FileIO
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import orjson

from nerite.config.options import TraceOptions
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import system_error
from nerite.core.model_calls import CallRequest, ChildRequest
from nerite.core.request import InferenceRequest
from nerite.observability.log import log
from nerite.observability.otlp import Exporter
from nerite.observability.trace import COMPUTED, RECEIVED, SENT, OtelTrace, Sampler, Trace, TraceSettings


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
        if outer is None or not outer.trace_id:
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


# Trace files in Triton's format: JSON arrays that are valid at any time.

MAX_PENDING = 100
"""Maximum number of traces kept in memory if no frequency is set."""


class TraceFile:
    """Collects complete traces and writes them in batches.

    With a frequency, each batch of so many traces goes into a file of its own, with a number appended to the name.
    Without one, all traces are appended to one file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._traces: list[bytes] = []
        self._next = 0
        self._frequency = 0
        self._size = 0
        """Size of the one file, as written by this server."""

    def add(self, trace: bytes, frequency: int, last: bool) -> None:
        """Add the records of a trace; write if it is the last of the requested count, or the batch is complete."""
        self._traces.append(trace)
        self._frequency = frequency
        if last or 0 < frequency <= len(self._traces):
            self._write_numbered()
        elif len(self._traces) >= MAX_PENDING:
            self.write()

    def write(self) -> None:
        """Write the pending traces."""
        if not self._traces:
            return
        if self._frequency:
            self._write_numbered()
        else:
            self._append()

    def _write_numbered(self) -> None:
        name, self._next = f"{self._name}.{self._next}", self._next + 1
        self._put(name, 0, b"[")

    def _append(self) -> None:
        """Append to the one file: create it, or replace its closing bracket."""
        if self._size and not Path(self._name).exists():
            self._size = 0
        self._size = self._put(self._name, max(self._size - 1, 0), b"," if self._size else b"[")

    def _put(self, name: str, at: int, first: bytes) -> int:
        """Write the pending traces to a file, from the bracket at offset ``at`` on; return its new size.

        If the file cannot be written, the traces are lost and the log says so; the file is restored, and no request
        fails.
        """
        traces, self._traces = self._traces, []
        rest = b",".join(filter(None, traces)) + b"]"
        try:
            with Path(name).open("r+b" if at else "wb", buffering=0) as file:
                try:
                    # The bracket is written last: until then the file can be restored.
                    _write(file, rest, at + 1)
                    _write(file, first, at)
                except OSError:
                    if at:
                        file.truncate(at + 1)
                    else:
                        Path(name).unlink()
                    raise
        except OSError as error:
            log.error(
                f"cannot write {len(traces)} traces, which are lost: {system_error(error, name)}. "
                "Or use another file: --trace-config triton,file"
            )
            return at and at + 1
        return at + 1 + len(rest)


def _write(file: FileIO, data: bytes, at: int) -> None:
    """Write all of ``data`` at an offset. Raises ``OSError``."""
    file.seek(at)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


# Records of a trace in Triton's format: JSON objects separated by commas, in order of time. The records of most traces
# differ only in numbers, which are put into a template: 1.9 us instead of 4.7, on the loop's thread.

_NUMBER: Final = b"\0"
"""Placeholder of the number of a trace: a byte that does not occur in JSON."""
_REQUEST_ID: Final = b"\1"
_when = itemgetter(0)


def trace_events(trace: Trace) -> list[tuple[int, str]]:
    """Return time and name of each event, in order of time."""
    found: list[tuple[int, str]] = []
    if trace.protocol:
        found += zip((trace.first_ns, trace.received_ns), RECEIVED[trace.protocol], strict=True)
    found.append((trace.began_ns, "REQUEST_START"))
    for queued_ns, timings in trace.executions:
        found.append((queued_ns, "QUEUE_START"))
        if timings is not None:
            times = (timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns)
            found += zip(times, COMPUTED, strict=True)
    if trace.ended_ns:
        found.append((trace.ended_ns, "REQUEST_END"))
    if trace.answered_ns and not trace.parent:
        found.append((trace.answered_ns, "INFER_RESPONSE_COMPLETE"))
    if trace.sends:
        found += zip(trace.sends, SENT[trace.protocol] * (len(trace.sends) // 2), strict=True)
    found.sort(key=_when)
    return found


def trace_json(trace: Trace) -> bytes:
    """Return the records of a trace."""
    number = trace.number
    if trace.tensors is None:
        times = usual_times(trace)
        if times is not None:
            return _from_template(trace, times)
        stamps = [f'{{"id":{number},"timestamps":[{{"name":"{name}","ns":{ns}}}]}}' for ns, name in trace_events(trace)]
        return b",".join((orjson.dumps(_first(trace)), ",".join(stamps).encode()))
    notes: list[tuple[int, dict[str, Any]]] = [
        (ns, {"activity": activity, "tensor": tensor}) for ns, activity, tensor in trace.tensors
    ]
    first = []
    if "TIMESTAMPS" in trace.sampler.values.levels:
        first.append(_first(trace))
        notes = [*((ns, {"timestamps": [{"name": name, "ns": ns}]}) for ns, name in trace_events(trace)), *notes]
        notes.sort(key=_when)
    return b",".join(map(orjson.dumps, [*first, *({"id": number, **record} for _, record in notes)]))


def _first(trace: Trace) -> dict[str, Any]:
    first: dict[str, Any] = {
        "id": trace.number,
        "model_name": trace.header.model_name,
        "model_version": trace.version,
    }
    if trace.id:
        first["request_id"] = trace.id
    if trace.parent:
        first["parent_id"] = trace.parent
    return first


def usual_times(trace: Trace) -> tuple[int, ...] | None:
    """Return the times of a request that was executed once and answered once; None for any other request."""
    if len(trace.executions) != 1 or len(trace.sends) != 2 or trace.parent:
        return None
    ((queued, timings),) = trace.executions
    if timings is None:
        return None
    first, received, began, ended, answered = (
        trace.first_ns,
        trace.received_ns,
        trace.began_ns,
        trace.ended_ns,
        trace.answered_ns,
    )
    started, ready, computed, over = timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns
    begun, sent = trace.sends
    if first <= received <= began <= queued <= started <= ready <= computed <= over <= ended <= answered <= begun:
        return first, received, began, queued, started, ready, computed, over, ended, answered, begun, sent
    return None


def _from_template(trace: Trace, times: tuple[int, ...]) -> bytes:
    """Return the records of a usual trace, from the template."""
    text = _template(trace.header.model_name, trace.version, trace.protocol, trace.id != "") % times
    if trace.id:
        text = text.replace(_REQUEST_ID, orjson.dumps(trace.id))
    return text.replace(_NUMBER, b"%d" % trace.number)


@lru_cache(256)
def _template(model: str, version: int, protocol: str, named: bool) -> bytes:
    """Return the records of usual traces, with ``%d`` for each time. ``named``: the request has an id."""
    request_id = b',"request_id":' + _REQUEST_ID if named else b""
    first = b'{"id":%b,"model_name":%b,"model_version":%d%b}' % (_NUMBER, orjson.dumps(model), version, request_id)
    before = (*RECEIVED[protocol], "REQUEST_START", "QUEUE_START")
    after = ("REQUEST_END", "INFER_RESPONSE_COMPLETE", *SENT[protocol])
    stamps = (
        b'{"id":%b,"timestamps":[{"name":"%b","ns":%%d}]}' % (_NUMBER, name.encode())
        for name in (*before, *COMPUTED, *after)
    )
    return b",".join((first.replace(b"%", b"%%"), *stamps))
