"""Stands before the queue of a model version, and lets through what was not answered before.

Requests that ask the same while the first of them is looked up or computed wait for its answer: without that, a cache
is of no use in the moment that matters most, when something becomes popular or the server starts. A request shares
only what a model has answered successfully. Where the first is cancelled the next one takes its place; where it fails,
each of the others goes its own way and learns its own fate, as without a cache. One that is to be answered sooner or
later than the first, by its priority or timeout, does not wait for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from nerite.cache.interface import ResponseCache
from nerite.core import headers
from nerite.core.byte_budget import CACHE_KEYS, Memo
from nerite.core.errors import Cancelled, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ForwardingSink
from nerite.core.failures import report
from nerite.core.request import MIXED, NAME, InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.observability.statistics import RequestOutcome, VersionStatistics

# What two requests must have in common to be answered alike, as 32 bytes.
#
# A key stands for everything of a request that its model can see and that may matter to the answer: each input's
# name, datatype, shape and bytes, whatever their order; the outputs that are wanted; custom parameters; the
# correlation id; the tenant, unless tenants share answers; and for the model itself, see ``renew``. Not the id, the
# priority, the timeout and the idempotency key, which are the caller's own.
#
# What a header says is worked out once for each header. A request then costs one pass over its tensors: their number
# and sizes follow from the header (those of strings from their own lengths, which were checked), so nothing has to
# stand between them; and the tenant stands behind its own length. SHA-256, because processors have instructions for
# it: twice as fast as anything else in ``hashlib``, and no two inputs with one key can be found.

_HASH: Final = 640
"""Bytes that a hash takes in memory with its list of inputs."""


class CacheKeys:
    """The keys of the requests to one model version."""

    __slots__ = ("_known", "_outputs", "_shared", "origin")

    def __init__(self, outputs: Iterable[str], *, shared: bool = False) -> None:
        """``outputs`` are all that the version has: a request that names none wants all.

        ``shared``: tenants share answers. If not, the time of an answer does not reveal what another tenant has asked.
        """
        self._shared = shared
        self._outputs = frozenset(outputs)
        self.origin = ""
        """What the answers come from: model, version, and what it was made from. Empty: not known, so no keys."""
        self._known: Memo[RequestHeader, tuple[hashlib._Hash, list[int]]] = Memo()
        """The hash as far as the header goes, and the inputs in the order of their names."""

    def renew(self, origin: str) -> None:
        """Have other keys than before."""
        self.origin = origin
        self._known.clear()

    def of(self, request: InferenceRequest) -> bytes:
        """Return the key of a request; nothing if it is ``MIXED`` and tenants do not share answers."""
        header = request.header
        caller = None if self._shared else header.caller
        if caller is MIXED:
            return b""
        beginning, order = self._known.get(header) or self._begin(header)
        digest = beginning.copy()
        digest.update(b"0:" if caller is None else b"%d:%b" % (len(tenant := caller.tenant.encode()), tenant))
        data = request.data
        for place in order:
            digest.update(data[place])
        return digest.digest()

    def _begin(self, header: RequestHeader) -> tuple[hashlib._Hash, list[int]]:
        order = sorted(range(len(header.inputs)), key=lambda place: header.inputs[place].name)
        said = (
            self.origin,
            [(spec.name, spec.datatype.name, spec.shape) for spec in map(header.inputs.__getitem__, order)],
            sorted(header.wanted or self._outputs),
            # By their ``repr``: 1, 1.0 and True are equal to Python, but need not be to a model.
            sorted((name, repr(value)) for name, value in header.parameters.items() if name != NAME),
            (header.sequence_id, header.sequence_start, header.sequence_end),
        )
        known = (hashlib.sha256(repr(said).encode()), order)
        if self.origin:
            CACHE_KEYS.put(self._known, header, known, _HASH + headers.request_header_bytes(header))
        return known


_now = time.monotonic_ns


class RequestQueueInterface(Protocol):
    """What takes the requests of a version and has them answered."""

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""

    def submit(self, request: InferenceRequest) -> None:
        """RequestQueueInterface a request; its answer comes through ``request.respond``."""

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now."""

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``."""


class ResponseCacheFrontend:
    """A queue with a cache before it. For the loop's thread only."""

    def __init__(
        self,
        cache: ResponseCache,
        queue: RequestQueueInterface,
        statistics: VersionStatistics,
        outputs: Iterable[str],
        *,
        shared: bool = False,
    ) -> None:
        """``outputs`` are the names of all outputs of the version. ``shared``: tenants share answers."""
        self._cache = cache
        self._queue = queue
        self._statistics = statistics
        self._keys = CacheKeys(outputs, shared=shared)
        self._origin_of: Callable[[], str] = lambda: ""
        self._open: dict[bytes, CacheLookup] = {}
        """What is looked up or computed now, by its key."""
        self._waiting: dict[InferenceRequest, CacheLookup] = {}
        """Requests that are not in the queue: their key is looked up, or another one is computed for them."""
        self._on_drained: list[Callable[[], None]] = []

    def renew(self, origin_of: Callable[[], str]) -> None:
        """Answer with nothing that comes from elsewhere: ask where answers come from now (see ``CacheKeys.origin``)."""
        self._origin_of = origin_of
        self._keys.renew("")

    @property
    def pending(self) -> int:
        """Requests that wait: for an instance, for the cache, or for another request."""
        return self._queue.pending + len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self._queue.in_flight + len(self._waiting)

    def submit(self, request: InferenceRequest) -> None:
        """Answer a request from the cache, or let it through."""
        if not self._keys.origin:
            self._keys.renew(self._origin_of())
            if not self._keys.origin:
                self._queue.submit(request)
                return
        key = self._keys.of(request)
        if not key:
            self._queue.submit(request)
            return
        question = self._open.get(key)
        if question is None:
            question = self._open[key] = CacheLookup(self, key, request)
            try:
                self._cache.lookup(key, question.found)
            except Exception as error:
                self.failed(question, error)
                return
            if question.looking:
                self._wait(request, question)
        elif question.urgency == _urgency(request):
            question.requests.append(request)
            self._wait(request, question)
        else:
            self._compute_apart(request)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now."""
        if self._waiting:
            self._on_drained.append(call)
        else:
            self._queue.when_drained(call)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``. What runs, runs on."""
        for request in list(self._waiting):
            self._refuse(request, error, RequestOutcome.OTHER)
        self._queue.abandon(error)
        self._check_drained()

    def looked_up(self, question: CacheLookup, response: InferenceResponse | None) -> None:
        """The cache has answered."""
        requests = question.requests
        if response is None and requests:
            self._waiting.pop(requests[0], None)
            self._compute(question)
        else:
            # Found, or nobody waits for it any more.
            del self._open[question.key]
            for request in requests:
                self._waiting.pop(request, None)
                if response is not None:
                    self._answer(request, response, question.asked_ns)
        self._check_drained()

    def failed(self, question: CacheLookup, error: Exception) -> None:
        """Go on without the cache, after an exception in what it had to do for some requests."""
        report("cache", error, f"for {len(question.requests)} requests")
        question.looking = False
        if self._open.get(question.key) is question:
            del self._open[question.key]
        for request in question.requests:
            self._waiting.pop(request, None)
            if not request.finished:
                request.on_cancel = None
                self._compute_apart(request)
        self._check_drained()

    def computed(self, question: CacheLookup, response: InferenceResponse) -> None:
        """The first of the requests that ask the same has its answer."""
        del self._open[question.key]
        first, *others = question.requests
        for each in others:
            del self._waiting[each]
            each.on_cancel = None
        if first.cancelled or isinstance(response.error, Cancelled):
            # What a model says to one whom nobody waits for is no answer to the others.
            if others:
                self._compute_for(others, question.key)
        elif response.header is None or (first.header.shared and self._keys.of(first) != question.key):
            # It failed, or its client has written into the shared memory that it was computed from.
            for each in others:
                self._compute_apart(each)
        else:
            began = _now()
            self._cache.insert(question.key, response)
            self._statistics.cache_miss.add(_now() - began, 0)
            for each in others:
                self._answer(each, response, _now())
        self._check_drained()

    def _compute_for(self, requests: list[InferenceRequest], key: bytes) -> None:
        """Have the first of some requests that ask the same computed, and the others wait for it."""
        question = self._open[key] = CacheLookup(self, key, requests[0])
        for each in requests[1:]:
            question.requests.append(each)
            self._wait(each, question)
        self._compute(question)

    def _compute(self, question: CacheLookup) -> None:
        first = question.requests[0]
        question.looking = False
        self._statistics.missed(_now() - question.asked_ns)
        first.sink = LookupListener(question, first.sink)
        first.on_cancel = None
        self._queue.submit(first)

    def _compute_apart(self, request: InferenceRequest) -> None:
        """Have a request computed, and keep nothing: another one that asks the same is, or failed."""
        self._statistics.missed(0)
        self._queue.submit(request)

    def _answer(self, request: InferenceRequest, response: InferenceResponse, found_ns: int) -> None:
        self._statistics.found(request, max(found_ns, request.queued_ns), _now())
        if isinstance(request.sink, ExecutionObserver):
            request.sink.ran(request, None)
        request.respond(response)

    def _wait(self, request: InferenceRequest, question: CacheLookup) -> None:
        self._waiting[request] = question
        request.on_cancel = self._cancelled

    def _cancelled(self, request: InferenceRequest) -> None:
        self._refuse(request, Cancelled(""), RequestOutcome.CANCELED)
        self._check_drained()

    def _refuse(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        """Answer a request that waits with an error."""
        self._waiting.pop(request).requests.remove(request)
        self._statistics.failed(outcome, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))

    def _check_drained(self) -> None:
        if self._on_drained and not self._waiting:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                self._queue.when_drained(call)


class CacheLookup:
    """What some requests ask: first the cache, then the model."""

    __slots__ = ("_gate", "asked_ns", "key", "looking", "requests", "urgency")

    def __init__(self, gate: ResponseCacheFrontend, key: bytes, request: InferenceRequest) -> None:
        self._gate = gate
        self.key = key
        self.requests = [request]
        """Those that wait for the answer. Once the cache had none, the first is computed for all."""
        self.urgency = _urgency(request)
        self.asked_ns = _now()
        self.looking = True
        """The cache has not answered."""

    def found(self, response: InferenceResponse | None) -> None:
        """Take the answer of the cache."""
        self.looking = False
        try:
            self._gate.looked_up(self, response)
        except Exception as error:
            self._gate.failed(self, error)

    def computed(self, response: InferenceResponse) -> None:
        """Take the answer of the model."""
        try:
            self._gate.computed(self, response)
        except Exception as error:
            self._gate.failed(self, error)
        # The first of them has a listener, which has this: they would hold each other, and their tensors.
        self.requests = []


class LookupListener(ForwardingSink):
    """Takes the place of a request's sink, to see what the model answers."""

    __slots__ = ("_only", "_question")

    def __init__(self, question: CacheLookup, sink: ReplySink) -> None:
        super().__init__(sink)
        self._question = question
        self._only: InferenceResponse | None = None
        """The response that came before the one that says only that no other comes."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and tell of the last."""
        self._sink.respond(request, response, final)
        if not final:
            self._only = response
        else:
            self._question.computed(self._only if response.empty and self._only is not None else response)


def _urgency(request: InferenceRequest) -> tuple[int, int]:
    return request.header.priority, request.header.timeout_us
