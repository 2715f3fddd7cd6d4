"""Traces of requests: which are made, what is noted in them, and when they are complete.

A trace stands between a request and its sink, so it sees each response leave; the dispatcher tells it of the execution.
A model of which nothing is traced knows nothing of all this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nerite.config.options import TraceOptions
from nerite.core import dtype as dtypes
from nerite.core.child_request import ChildRequest
from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec, to_array
from nerite.core.witness import Relay
from nerite.observability.trace_file import Record, TraceFile
from nerite.observability.trace_settings import Sampler, TraceSettings

_now = time.monotonic_ns
_RECEIVED: Final = {
    "HTTP": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "GRPC": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}


class Tracing:
    """The traces of a server."""

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called when other settings hold."""
        self.settings = TraceSettings(options, self._settings_changed)
        self._changed = changed
        self._file = TraceFile(options.file)
        self._next = 1

    def wants(self, model: str) -> bool:
        """Return whether requests of a model may be traced."""
        return bool(self.settings.file and self.settings.sampler(model).values.levels)

    def begin(self, request: InferenceRequest, version: int) -> None:
        """Trace a request that is about to be queued, if its turn has come: of a step of an ensemble, its parent's."""
        if isinstance(request, ChildRequest):
            parent = request.parent.sink
            if isinstance(parent, Trace):
                self._begin(request, version, parent.sampler, parent.number)
            return
        sampler = self.settings.sampler(request.header.model_name)
        if sampler.choose():
            self._begin(request, version, sampler, 0)

    def _begin(self, request: InferenceRequest, version: int, sampler: Sampler, parent: int) -> None:
        sampler.open += 1
        request.sink = Trace(request, version, self._next, sampler, self._complete, parent)
        self._next += 1

    def close(self) -> None:
        """Write what is there."""
        self._file.write()

    def _settings_changed(self) -> None:
        self._file.write()
        self._changed()

    def _complete(self, trace: Trace) -> None:
        sampler = trace.sampler
        sampler.open -= 1
        values = sampler.values
        self._file.add(trace.records(), values.log_frequency, last=values.count == 0 and not sampler.open)


class Trace(Relay):
    """What happened to one request. Takes the place of its sink."""

    def __init__(
        self,
        request: InferenceRequest,
        version: int,
        number: int,
        sampler: Sampler,
        complete: Callable[[Trace], None],
        parent: int = 0,
    ) -> None:
        """``complete`` is called once nothing more can happen; ``parent`` is the trace it belongs to, or 0."""
        self._parent = parent
        self.sampler = sampler
        self._request = request
        super().__init__(request.sink)
        self._complete = complete
        self.number = number
        self._version = version
        self._levels = sampler.values.levels
        self._notes: list[tuple[int, Record]] = []
        self._answered = self._ended = False
        self._runs = self._ran = self._between = False
        self._protocol = getattr(self._sink, "protocol", "")
        for name, at in zip(_RECEIVED.get(self._protocol, ()), self._received(), strict=False):
            self._stamp(name, at)
        self._began = _now()
        self._stamp("REQUEST_START", self._began)
        self._tensors("TENSOR_QUEUE_INPUT", request.header.inputs, request.data)

    def _received(self) -> tuple[int, int]:
        """Return when the first of a request was here, and when all of it. Mostly it is one piece."""
        arrived = self._request.arrived_ns
        return getattr(self._sink, "began_ns", 0) or arrived, arrived

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and note it."""
        if not self._answered:
            self._answered = True
            if not self._parent:
                self._stamp("INFER_RESPONSE_COMPLETE", _now())
        if response.header is not None:
            self._tensors("TENSOR_BACKEND_OUTPUT", response.header.outputs, response.data)
        sent = _now()
        self._sink.respond(request, response, final)
        if self._protocol and not response.empty:
            self._stamp(f"{self._protocol}_SEND_START", sent)
            self._stamp(f"{self._protocol}_SEND_END", _now())
        if final:
            self._ended = True
            if self._between:
                self._stamp("REQUEST_END", sent)
            if not self._runs:
                self._complete(self)

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note that an instance answers: sooner or later it says how it ran."""
        self._runs = not self._ran
        self._between = False
        super().parted(request, marks)

    def composed(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note that all steps are done: each has a trace of its own, with its times."""
        super().composed(request, marks)
        self._note_execution(request, None)
        self._note_end()

    def turned(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note one of several executions: who gives up before the next ends the request there."""
        super().turned(request, marks)
        self._runs, self._between = False, True
        self._note_execution(request, marks)

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note the execution, after which there is no other."""
        super().ran(request, marks)
        self._note_execution(request, marks)
        self._note_end()

    def _note_execution(self, request: InferenceRequest, marks: Marks | None) -> None:
        self._stamp("QUEUE_START", max(request.queued_ns, self._began))
        if marks is not None:
            self._stamp("COMPUTE_START", marks.started_ns)
            self._stamp("COMPUTE_INPUT_END", marks.inputs_ready_ns)
            self._stamp("COMPUTE_OUTPUT_START", marks.computed_ns)
            self._stamp("COMPUTE_END", marks.ended_ns)

    def _note_end(self) -> None:
        self._runs, self._ran, self._between = False, True, False
        self._stamp("REQUEST_END", _now())
        if self._ended:
            self._complete(self)

    def records(self) -> list[Record]:
        """Return the trace as it is written, in the order in which things happened."""
        request = self._request
        first: Record = {"model_name": request.header.model_name, "model_version": self._version}
        if request.id:
            first["request_id"] = request.id
        if self._parent:
            first["parent_id"] = self._parent
        records = [first] if "TIMESTAMPS" in self._levels else []
        records += [record for _, record in sorted(self._notes, key=lambda note: note[0])]
        return [{"id": self.number, **record} for record in records]

    def _stamp(self, name: str, at: int) -> None:
        if "TIMESTAMPS" in self._levels:
            self._notes.append((at, {"timestamps": [{"name": name, "ns": at}]}))

    def _tensors(self, activity: str, specs: Iterable[TensorSpec], data: Iterable[Buffer]) -> None:
        if "TENSORS" in self._levels:
            for spec, buffer in zip(specs, data, strict=False):
                self._notes.append((_now(), {"activity": activity, "tensor": described(spec, buffer)}))


def described(spec: TensorSpec, data: Buffer) -> dict[str, str]:
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
