"""Response cache in front of the queue of a model version: answers hits, and passes misses on to the queue.

Concurrent equal requests are coalesced: while the first is looked up or computed, the others wait for its answer.
Without that, a cache is useless when it matters most: when a request becomes popular, or the server starts (a
thundering herd). Only successful answers are shared. If the first request is cancelled, the next one takes its place;
if it fails, each of the others is computed on its own, as without a cache. A request whose priority or timeout differs
from the first one's does not wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from time import monotonic_ns
from typing import Final

from nerite.cache.interface import ResponseCache
from nerite.core import headers
from nerite.core.byte_budget import CACHE_KEYS, Memo
from nerite.core.errors import Cancelled, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ForwardingSink
from nerite.core.failures import report
from nerite.core.queue_stage import FrontStage, QueueStage
from nerite.core.request import MIXED, NAME, InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.observability.statistics import RequestOutcome, VersionStatistics

_HASH: Final = 640
"""Bytes of memory that a hash takes with its list of inputs."""


class CacheKeys:
    """Computes the cache keys of requests to one model version: 32 bytes that are equal if the answers must be.

    A key covers everything in a request that its model can see and that may influence the answer: name, datatype, shape
    and bytes of each input in any order, the requested outputs, custom parameters, the correlation id, the tenant
    (unless tenants share answers), and the model itself, see ``renew``. It does not cover the id, the priority, the
    timeout and the idempotency key, which concern only the caller.

    The part of the header is hashed once per distinct header, so that a request costs one pass over its tensors. Their
    number and sizes follow from the header (those of strings from their own lengths, which were validated), so no
    separators are needed; the tenant is preceded by its length. SHA-256, because processors have instructions for it:
    it is twice as fast as anything else in ``hashlib``, and collisions cannot be constructed.
    """

    __slots__ = ("_known", "_outputs", "_shared", "origin")

    def __init__(self, outputs: Iterable[str], *, shared: bool = False) -> None:
        """``outputs`` are all outputs of the version: a request that names none requests all.

        ``shared``: tenants share answers. Otherwise, response times reveal nothing about other tenants' requests.
        """
        self._shared = shared
        self._outputs = frozenset(outputs)
        self.origin = ""
        """Identifies the model, its version and its content. Empty while unknown: requests are not cached then."""
        self._known: Memo[RequestHeader, tuple[hashlib._Hash, list[int]]] = Memo()
        """By header: the hash of its part of the key, and the indices of the inputs in the order of their names."""

    def renew(self, origin: str) -> None:
        """Change the origin, which makes all keys different from before."""
        self.origin = origin
        self._known.clear()

    def of(self, request: InferenceRequest) -> bytes:
        """Return the key of a request; empty if its caller is ``MIXED`` and tenants do not share answers.

        Also empty if an input is, or an output may be, on a GPU.
        """
        header = request.header
        caller = None if self._shared else header.caller
        if caller is MIXED or header.device_outputs or header.preferred_device >= 0 or request.on_device:
            return b""
        header_hash, order = self._known.get(header) or self._begin(header)
        digest = header_hash.copy()
        digest.update(b"0:" if caller is None else b"%d:%b" % (len(tenant := caller.tenant.encode()), tenant))
        data = request.buffers
        for place in order:
            digest.update(data[place])
        return digest.digest()

    def _begin(self, header: RequestHeader) -> tuple[hashlib._Hash, list[int]]:
        order = sorted(range(len(header.inputs)), key=lambda place: header.inputs[place].name)
        content = (
            self.origin,
            [(spec.name, spec.datatype.name, spec.shape) for spec in map(header.inputs.__getitem__, order)],
            sorted(header.wanted or self._outputs),
            # As ``repr``: 1, 1.0 and True are equal in Python, but may differ to a model.
            sorted((name, repr(value)) for name, value in header.parameters.items() if name != NAME),
            (header.sequence_id, header.sequence_start, header.sequence_end),
        )
        known = (hashlib.sha256(repr(content).encode()), order)
        if self.origin:
            CACHE_KEYS.put(self._known, header, known, _HASH + headers.request_header_bytes(header))
        return known


class ResponseCacheFrontend(FrontStage):
    """Stage that answers from a response cache and passes misses on. For the loop's thread only."""

    def __init__(
        self,
        cache: ResponseCache,
        following: QueueStage,
        statistics: VersionStatistics,
        outputs: Iterable[str],
        *,
        shared: bool = False,
    ) -> None:
        """``outputs`` are the names of all outputs of the version. ``shared``: tenants share answers."""
        super().__init__(following)
        self._cache = cache
        self._statistics = statistics
        self._keys = CacheKeys(outputs, shared=shared)
        self._origin_of: Callable[[], str] = lambda: ""
        self._lookups: dict[bytes, CacheLookup] = {}
        """Lookups and computations in progress, by key."""
        self._waiting: dict[InferenceRequest, CacheLookup] = {}
        """Requests held here until their key is looked up or an equal request is computed."""

    def renew(self, origin_of: Callable[[], str]) -> None:
        """Stop using answers of the previous origin; ``origin_of`` returns the current one (``CacheKeys.origin``)."""
        self._origin_of = origin_of
        self._keys.renew("")

    @property
    def held(self) -> Collection[InferenceRequest]:
        """Requests that wait for the cache, or for the answer to an equal request."""
        return self._waiting

    def submit(self, request: InferenceRequest) -> None:
        """Answer a request from the cache, or pass it to the queue."""
        if not self._keys.origin:
            self._keys.renew(self._origin_of())
            if not self._keys.origin:
                self._following.submit(request)
                return
        key = self._keys.of(request)
        if not key:
            self._following.submit(request)
            return
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = CacheLookup(self, key, request)
            try:
                self._cache.lookup(key, lookup.found)
            except Exception as error:
                self.failed(lookup, error)
                return
            if lookup.looking:
                self._wait(request, lookup)
        elif lookup.urgency == _urgency(request):
            lookup.requests.append(request)
            self._wait(request, lookup)
        else:
            self._compute_uncached(request)

    def looked_up(self, lookup: CacheLookup, response: InferenceResponse | None) -> None:
        """Process the reply of the cache: answer the requests, or compute the first of them."""
        requests = lookup.requests
        if response is None and requests:
            self._waiting.pop(requests[0], None)
            self._compute(lookup)
        else:
            # A hit, or no request waits for it any more.
            del self._lookups[lookup.key]
            for request in requests:
                self._waiting.pop(request, None)
                if response is not None:
                    self._answer(request, response, lookup.asked_ns)
        self._check_drained()

    def failed(self, lookup: CacheLookup, error: Exception) -> None:
        """After an exception in a lookup, compute its requests without the cache."""
        report("cache", error, f"for {len(lookup.requests)} requests")
        lookup.looking = False
        if self._lookups.get(lookup.key) is lookup:
            del self._lookups[lookup.key]
        for request in lookup.requests:
            self._waiting.pop(request, None)
            if not request.finished:
                request.on_cancel = None
                self._compute_uncached(request)
        self._check_drained()

    def computed(self, lookup: CacheLookup, response: InferenceResponse) -> None:
        """Process the model's answer to the first of several equal requests."""
        del self._lookups[lookup.key]
        first, *others = lookup.requests
        for each in others:
            del self._waiting[each]
            each.on_cancel = None
        if first.cancelled or isinstance(response.error, Cancelled):
            # The answer to a cancelled request must not be shared.
            if others:
                self._compute_first(others, lookup.key)
        elif response.header is None or (first.header.shared and self._keys.of(first) != lookup.key):
            # It failed, or its client has changed the shared memory that it was computed from.
            for each in others:
                self._compute_uncached(each)
        else:
            began = monotonic_ns()
            self._cache.insert(lookup.key, response)
            self._statistics.cache_miss.add(monotonic_ns() - began, 0)
            for each in others:
                self._answer(each, response, monotonic_ns())
        self._check_drained()

    def _compute_first(self, requests: list[InferenceRequest], key: bytes) -> None:
        """Compute the first of several equal requests while the others wait for it."""
        lookup = self._lookups[key] = CacheLookup(self, key, requests[0])
        for each in requests[1:]:
            lookup.requests.append(each)
            self._wait(each, lookup)
        self._compute(lookup)

    def _compute(self, lookup: CacheLookup) -> None:
        first = lookup.requests[0]
        lookup.looking = False
        self._statistics.missed(monotonic_ns() - lookup.asked_ns)
        first.sink = LookupListener(lookup, first.sink)
        first.on_cancel = None
        self._following.submit(first)

    def _compute_uncached(self, request: InferenceRequest) -> None:
        """Compute a request without caching the answer, because an equal one is being computed or has failed."""
        self._statistics.missed(0)
        self._following.submit(request)

    def _answer(self, request: InferenceRequest, response: InferenceResponse, found_ns: int) -> None:
        self._statistics.found(request, max(found_ns, request.queued_ns), monotonic_ns())
        if isinstance(request.sink, ExecutionObserver):
            request.sink.ran(request, None)
        request.respond(response)

    def _wait(self, request: InferenceRequest, lookup: CacheLookup) -> None:
        self._waiting[request] = lookup
        request.on_cancel = self._cancelled

    def _cancelled(self, request: InferenceRequest) -> None:
        self._refuse(request, Cancelled(""), RequestOutcome.CANCELED)
        self._check_drained()

    def _refuse_held(self, error: NeriteError) -> None:
        for request in list(self._waiting):
            self._refuse(request, error, RequestOutcome.OTHER)

    def _refuse(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        """Answer a waiting request with an error."""
        self._waiting.pop(request).requests.remove(request)
        self._statistics.failed(outcome, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))


class CacheLookup:
    """Equal requests that wait for one answer, first from the cache, then from the model."""

    __slots__ = ("_frontend", "asked_ns", "key", "looking", "requests", "urgency")

    def __init__(self, frontend: ResponseCacheFrontend, key: bytes, request: InferenceRequest) -> None:
        self._frontend = frontend
        self.key = key
        self.requests = [request]
        """Requests that wait for the answer. After a miss, the first is computed for all of them."""
        self.urgency = _urgency(request)
        self.asked_ns = monotonic_ns()
        self.looking = True
        """The cache has not replied yet."""

    def found(self, response: InferenceResponse | None) -> None:
        """Process the reply of the cache; None is a miss."""
        self.looking = False
        try:
            self._frontend.looked_up(self, response)
        except Exception as error:
            self._frontend.failed(self, error)

    def computed(self, response: InferenceResponse) -> None:
        """Process the answer of the model."""
        try:
            self._frontend.computed(self, response)
        except Exception as error:
            self._frontend.failed(self, error)
        # Break the reference cycle with the listener of the first request, which would keep their tensors alive.
        self.requests = []


class LookupListener(ForwardingSink):
    """Wraps the sink of a request to observe the model's answer."""

    __slots__ = ("_last_response", "_lookup")

    def __init__(self, lookup: CacheLookup, sink: ReplySink) -> None:
        super().__init__(sink)
        self._lookup = lookup
        self._last_response: InferenceResponse | None = None
        """The response before an empty final one, if any."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Forward a response, and report the answer after the last one."""
        self._sink.respond(request, response, final)
        if not final:
            self._last_response = response
        else:
            self._lookup.computed(
                self._last_response if response.empty and self._last_response is not None else response
            )


def _urgency(request: InferenceRequest) -> tuple[int, int]:
    return request.header.priority, request.header.timeout_us
