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
from nerite.core.execution_observer import CallerSink, ForwardingSink
from nerite.core.failures import report
from nerite.core.request import Assignment, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.judge.outcome import Outcome, Stratum, token_stratum
from nerite.routes.table import RouteState, TakeOutcome

_REFUSALS = (Overloaded, QuotaExceeded, Exhausted, QueueFull)
_TIMEOUTS = (DeadlineExceeded, QueueTimeout)
_new_tuple = tuple.__new__
_STREAM = "stream"
"""Input with which callers ask text models for a stream of responses."""


class ObservedSink(CallerSink):
    """Measures a request of an observed route, and reports its outcome once."""

    __slots__ = (
        "_assignment",
        "_count",
        "_first_ns",
        "_last_ns",
        "_lost",
        "_request",
        "_state",
        "_stratum",
        "_take",
        "_under_way",
        "counted",
    )

    def __init__(
        self, request: InferenceRequest, assignment: Assignment, state: RouteState, take: TakeOutcome, stratum: Stratum
    ) -> None:
        """``take`` gets the outcome."""
        self._sink = request.sink  # as the base class does
        self._request = request
        self._assignment = assignment
        self._state = state
        self._stratum = stratum
        self._take = take
        self._lost = False
        self._count = self.counted = 0
        self._under_way = state.under_way
        self._under_way.add(self)
        request.sink = self

    @property
    def arrived_ns(self) -> int:
        """When the request arrived."""
        return self._request.arrived_ns

    def lose(self) -> None:
        """Record that the arm has lost the request, which counts as its error even if another arm answers."""
        self._lost = True

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Measure a response, and pass it on."""
        now = monotonic_ns()
        error = response.error
        if error is not None or response.header is not None:
            if not self._count:
                self._first_ns = now
            self._count += 1
            self._last_ns = now
        if final and self in self._under_way:
            self._under_way.discard(self)
            try:
                if error is not None or request.cancelled or self._lost:
                    self._take(self._outcome(now, self._failure(request, error)), self.counted)
                else:
                    self._take(self._outcome(now, ""), self.counted)
            except Exception as failure:  # the request must not fail because of it
                report("admission", failure, f"while an outcome of route '{self._assignment.route}' was judged")
        self._sink.respond(request, response, final)

    def outcome(self, now_ns: int) -> Outcome:
        """Return the outcome that the request would have if it succeeded now."""
        return self._outcome(now_ns, "")

    def _failure(self, request: InferenceRequest, error: NeriteError | None) -> str:
        """Return how a request has ended that was not answered well by its arm, and count it."""
        how = kind_of(error, cancelled=request.cancelled) or "error"
        counters = self._state.counters.get(self._assignment.arm)
        if how != "cancelled" and counters is not None:
            counters.errors += 1
        return how

    def _outcome(self, now: int, how: str) -> Outcome:
        _, _, candidate, probability, cluster = self._assignment
        begun, count = self._request.arrived_ns, self._count
        first = whole = (now - begun) / 1e3
        between = 0.0
        if count:
            first = (self._first_ns - begun) / 1e3
            if count > 1:
                between = (self._last_ns - self._first_ns) / 1e3 / (count - 1)
        outcome = candidate, probability, now, whole, first, between, how, self._stratum, cluster
        return _new_tuple(Outcome, outcome)  # in half the time of ``Outcome(...)``


class StrataOfHeader:
    """The class of requests with one header, from what is known before an arm is chosen.

    Sizes of a class differ by a factor of four at most. How many tokens are cached depends on the arm, so it makes no
    class here.
    """

    __slots__ = ("_last", "_size", "_stream", "_tenant")

    def __init__(self, header: RequestHeader) -> None:
        self._tenant = "" if header.caller is None else header.caller.tenant
        names = [spec.name for spec in header.inputs]
        self._stream = names.index(_STREAM) if _STREAM in names else -1
        self._last = Stratum()
        self._size = -1

    def of(self, request: InferenceRequest) -> Stratum:
        """Return the class of a request."""
        size = sum(map(len, request.data)).bit_length() + 1 >> 1
        stream = self._stream >= 0 and bytes(request.buffers[self._stream][:1]) == b"\1"
        last = self._last
        if self._size != size or last[3] is not stream:
            self._size = size
            last = self._last = token_stratum(f"<{4**size} B", "", self._tenant, stream)
        return last


def kind_of(error: NeriteError | None, *, cancelled: bool) -> str:
    """Return how a request ended, as an ``Outcome`` names it."""
    if cancelled or isinstance(error, Cancelled):
        return "cancelled"
    if error is None:
        return ""
    if isinstance(error, _TIMEOUTS):
        return "timeout"
    return "refused" if isinstance(error, _REFUSALS) else "error"


class ArmFallback(CallerSink):
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
