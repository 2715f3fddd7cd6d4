"""Observes the requests of a route: each one gives one outcome, whatever becomes of it.

Sinks are put in front of those of callers: one that measures, while a route is observed, and one that hands a request
over to another arm, at the moment when its own arm has lost it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from nerite.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    NeriteError,
    Overloaded,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
)
from nerite.core.execution_observer import ForwardingSink, TraceContext
from nerite.core.failures import report
from nerite.core.request import Assignment, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.judge.outcome import Outcome, Stratum, token_stratum
from nerite.routes.table import ArmCounters, RouteState, TakeOutcome

_REFUSALS = (Overloaded, QuotaExceeded, Exhausted, QueueFull)
_TIMEOUTS = (DeadlineExceeded, QueueTimeout)
_STREAM = "stream"
"""Input with which callers ask text models for a stream of responses."""


class CallerSink(ForwardingSink):
    """A sink directly in front of the one of a client, of whose properties traces read."""

    __slots__ = ()

    @property
    def protocol(self) -> str:
        """Protocol of the client; empty for requests that no client sent."""
        found: str = getattr(self._sink, "protocol", "")
        return found

    @property
    def began_ns(self) -> int:
        """Arrival of the first bytes of a request that came in several pieces; else 0."""
        found: int = getattr(self._sink, "began_ns", 0)
        return found

    @property
    def outer_span(self) -> TraceContext | None:
        """The client's span that the request belongs under."""
        return getattr(self._sink, "outer_span", None)

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return the attributes that the client's sink adds to a span."""
        told = getattr(self._sink, "span_attributes", None)
        return {} if told is None else told(request)


class ObservedSink(CallerSink):
    """Measures a request of an observed route, and reports its outcome once."""

    __slots__ = (
        "_assignment",
        "_count",
        "_counters",
        "_first_ns",
        "_last_ns",
        "_lost",
        "_request",
        "_state",
        "_stratum",
        "_take",
        "counted",
    )

    def __init__(
        self,
        request: InferenceRequest,
        assignment: Assignment,
        state: RouteState,
        counters: ArmCounters,
        take: TakeOutcome,
    ) -> None:
        """``take`` gets the outcome."""
        super().__init__(request.sink)
        self._request: InferenceRequest | None = request
        self._assignment = assignment
        self._state = state
        self._counters = counters
        self._stratum = stratum_of(request)
        self._take = take
        self._first_ns = self._last_ns = self._count = 0
        self._lost = False
        self.counted = 0
        state.under_way[self] = None
        request.sink = self

    def lose(self) -> None:
        """Record that the arm has lost the request, which counts as its error even if another arm answers."""
        self._lost = True

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Measure a response, and pass it on."""
        now = monotonic_ns()
        if not response.empty:
            if not self._count:
                self._first_ns = now
            self._count += 1
            self._last_ns = now
        if final and self._request is not None:
            self._request = None
            self._state.under_way.pop(self, None)
            try:
                self._end(request, response.error, now)
            except Exception as error:  # the request must not fail because of it
                report("admission", error, f"while an outcome of route '{self._assignment.route}' was judged")
        self._sink.respond(request, response, final)

    def _end(self, request: InferenceRequest, error: NeriteError | None, now: int) -> None:
        how = kind_of(error, cancelled=request.cancelled)
        if self._lost and not how:
            how = "error"
        if how not in ("", "cancelled"):
            self._counters.errors += 1
        self._take(self._outcome(request, now, how), self.counted)

    def outcome(self, now_ns: int) -> Outcome:
        """Return the outcome that the request would have if it ended now."""
        request = self._request
        assert request is not None, "it has not ended"
        return self._outcome(request, now_ns, "")

    def _outcome(self, request: InferenceRequest, now: int, how: str) -> Outcome:
        begun, assignment = request.arrived_ns, self._assignment
        between = self._last_ns - self._first_ns if self._count > 1 else 0
        return Outcome(
            assignment.candidate,
            assignment.probability,
            now,
            (now - begun) / 1e3,
            ((self._first_ns or now) - begun) / 1e3,
            between / 1e3 / (self._count - 1) if between else 0.0,
            how,
            self._stratum,
            assignment.cluster,
        )


def kind_of(error: NeriteError | None, *, cancelled: bool) -> str:
    """Return how a request ended, as an ``Outcome`` names it."""
    if cancelled or isinstance(error, Cancelled):
        return "cancelled"
    if error is None:
        return ""
    if isinstance(error, _TIMEOUTS):
        return "timeout"
    return "refused" if isinstance(error, _REFUSALS) else "error"


def stratum_of(request: InferenceRequest) -> Stratum:
    """Return the class of a request, from what is known before an arm is chosen.

    Sizes of a class differ by a factor of four at most. How many tokens are cached depends on the arm, so it makes no
    class here.
    """
    header, data = request.header, request.data
    stream = any(
        spec.name == _STREAM and bytes(given[:1]) == b"\1" for spec, given in zip(header.inputs, data, strict=True)
    )
    tenant = "" if header.caller is None else header.caller.tenant
    size = f"<{4 ** (sum(map(len, data)).bit_length() + 1 >> 1)} bytes"
    return token_stratum(size, "", tenant, stream)


class HandOver(CallerSink):
    """Hands a request over to another arm instead of answering it with the error of an arm that has lost it.

    Put in front of a caller's sink, behind all that were put in front of that since, which see the request end.
    """

    __slots__ = ("_again",)

    def __init__(self, request: InferenceRequest, again: Callable[[InferenceRequest], bool]) -> None:
        """``again`` submits a request to another arm; it returns False if there is none."""
        above: ForwardingSink | None = None
        below = request.sink
        while isinstance(below, ForwardingSink) and not isinstance(below, CallerSink):
            above, below = below, below.behind
        super().__init__(below)
        self._again = again
        if above is None:
            request.sink = self
        else:
            above.behind = self

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Submit the request again if it failed; else pass the response on."""
        if response.error is None or not final or request.cancelled or isinstance(response.error, Cancelled):
            self._sink.respond(request, response, final)
            return
        request.sink = self._sink
        request.finished = False
        request.queue = None
        if isinstance(self._sink, ObservedSink):
            self._sink.lose()
        if not self._again(request):
            request.finished = True
            self._sink.respond(request, response, final)
