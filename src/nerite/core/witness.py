"""A sink that also wants to know how its request ran: a trace, an ensemble that adds up what its steps took."""

from __future__ import annotations

from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest, ReplySink
from nerite.core.trace_context import TraceContext


class Witness:
    """Told by the scheduler, on the loop's thread, before the answer that the news are about is passed on."""

    __slots__ = ()

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note of the execution. ``marks`` is None if the worker died. Responses may be still to come."""

    def turned(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note of an execution after which the request waits to run once more."""

    def composed(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note that an ensemble is done. ``marks`` has the sums over its steps; None: it failed."""

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note of one of several responses; ``marks`` as in ``Part``. Sooner or later comes ``ran`` as well."""

    @property
    def trace(self) -> object:
        """What notes how the request runs, None where nobody does. Said by whoever stands before it, too."""
        return None

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return where the request stands in a trace: see ``trace_context``."""
        return None


class Relay(Witness):
    """A sink before another one, which gets the news if it wants them. Responses are the business of who derives."""

    __slots__ = ("_sink",)

    def __init__(self, sink: ReplySink) -> None:
        self._sink = sink

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, Witness):
            self._sink.ran(request, marks)

    def turned(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, Witness):
            self._sink.turned(request, marks)

    def composed(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, Witness):
            self._sink.composed(request, marks)

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        if isinstance(self._sink, Witness):
            self._sink.parted(request, marks)

    @property
    def trace(self) -> object:
        """Return what the sink says."""
        return getattr(self._sink, "trace", None)

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return what the sink says."""
        return self._sink.context_of(request) if isinstance(self._sink, Witness) else None
