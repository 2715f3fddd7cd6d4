"""Idempotency keys: a client that retries a request after a broken connection joins the answer in progress.

A request with a key is not queued itself. A carrier request is queued in its place, which a disconnecting client does
not cancel. All requests with the key follow it: they get the responses so far, and then each new one.
``KeyedResponses`` decides what is kept and for how long.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from nerite.admission import refusals
from nerite.admission.policy import RetentionLimits
from nerite.admission.queue import caller_of, deadline_of
from nerite.cache.frontend import CacheKeys
from nerite.core import headers
from nerite.core.errors import Cancelled, KeyReused, NeriteError, Unsupported
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.queue_stage import FrontStage, QueueStage
from nerite.core.request import NAME, IdempotencyKey, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.dispatch.busy_poll import LoopTimer

if TYPE_CHECKING:
    from nerite.admission.controller import AdmissionController

_SPARE: Final = 64
"""Number of stale grace-period entries always tolerated, in addition to one per answer."""


class KeyedResponse:
    """State of the answer to one idempotency key. Changed by ``KeyedResponses`` only."""

    __slots__ = ("complete", "following", "kept", "key", "question", "size", "until")

    def __init__(self, key: Hashable, question: object) -> None:
        self.key = key
        self.question = question
        """Content of the request; equal for equal requests."""
        self.following = 0
        """Number of followers."""
        self.complete = False
        self.kept = False
        """Other requests may still join."""
        self.size = 0
        """Number of bytes kept."""
        self.until: int | None = None
        """End of its grace period; None while an incomplete answer has followers."""


A = TypeVar("A", bound=KeyedResponse)


class KeyedResponses(Generic[A]):
    """Decides which answers are kept for retries with the same key, and for how long; one per server.

    An answer exists from its first request on. It continues while it has followers, and for a grace period after the
    last one has gone; a complete answer is kept for the same period. An equal request with the same key joins it within
    that time; a different request with the same key is rejected.

    The kept bytes are bounded: the oldest complete answers are evicted first. An incomplete answer that is too long by
    itself is no longer kept: its followers continue, but no request can join.
    """

    def __init__(self, limits: RetentionLimits) -> None:
        self.limits = limits
        self.size = 0
        """Number of bytes kept."""
        self._kept: dict[Hashable, A] = {}
        self._complete: dict[Hashable, A] = {}
        """The complete ones among ``_kept``, oldest first."""
        self._ends: list[tuple[int, int, Hashable]] = []
        """Heap of the ends of grace periods. Entries that differ from their answer's ``until`` are stale."""
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[A]:
        return iter(self._kept.values())

    def ask(self, answer: A) -> A | None:
        """Register a follower of ``answer``, or of the kept answer with the same key; return the answer followed.

        Return None if the key belongs to a different request.
        """
        found = self._kept.setdefault(answer.key, answer)
        if found.question != answer.question:
            return None
        found.kept = True
        found.following += 1
        if not found.complete:
            found.until = None
        return found

    def left(self, answer: A, now: int) -> bool:
        """Record that a follower has gone; return whether the answer must be cancelled."""
        answer.following -= 1
        if answer.following or answer.complete:
            return False
        if not answer.kept or not self.limits.grace_ns:
            self.give_up(answer)
            return True
        self._start_grace(answer, now)
        return False

    def grew(self, answer: A, size: int) -> None:
        """Record that an answer has grown by ``size`` bytes; stop keeping it if it exceeds the limit."""
        if not answer.kept:
            return
        answer.size += size
        self.size += size
        self._make_room()
        if self.size > self.limits.max_bytes:
            self.give_up(answer)

    def ended(self, answer: A, now: int, *, failed: bool) -> None:
        """Record that an answer is complete. One that ``failed`` is not kept, so that a retry runs again."""
        answer.complete = True
        if not answer.kept:
            return
        if failed or not self.limits.grace_ns:
            self.give_up(answer)
            return
        self._complete[answer.key] = answer
        self._start_grace(answer, now)
        self._make_room()

    def give_up(self, answer: A) -> None:
        """Stop keeping an answer: the next request with its key starts a new one."""
        if answer.kept:
            answer.kept = False
            self.size -= answer.size
            del self._kept[answer.key]
            self._complete.pop(answer.key, None)

    def due(self, now: int) -> list[A]:
        """Drop the answers whose grace period has ended; return the incomplete ones, which must be cancelled."""
        stopped = []
        while self._ends and self._ends[0][0] <= now:
            at, _, key = heapq.heappop(self._ends)
            answer = self._kept.get(key)
            if answer is not None and answer.until == at:
                self.give_up(answer)
                if not answer.complete:
                    stopped.append(answer)
        return stopped

    def next_time(self) -> int | None:
        """Return when to call ``due`` unless another event comes first; None for never."""
        return self._ends[0][0] if self._ends else None

    def follow(self, limits: RetentionLimits) -> None:
        """Apply new limits. A grace period that has started is not changed."""
        self.limits = limits
        self._make_room()

    def _start_grace(self, answer: A, now: int) -> None:
        answer.until = now + self.limits.grace_ns
        heapq.heappush(self._ends, (answer.until, next(self._numbers), answer.key))
        if len(self._ends) > 2 * len(self._kept) + _SPARE:
            self._ends = [end for end in self._ends if (kept := self._kept.get(end[2])) and kept.until == end[0]]
            heapq.heapify(self._ends)

    def _make_room(self) -> None:
        """Evict complete answers, oldest first, until the rest is within the limits."""
        while self._complete and (len(self._complete) > self.limits.max_answers or self.size > self.limits.max_bytes):
            self.give_up(next(iter(self._complete.values())))


_AT_ONCE: Final = 32
"""Maximum number of recorded responses sent to a follower in one loop turn, so that other requests are not delayed."""
_OVERHEAD: Final = 512
"""Approximate bytes of a response in addition to its header and data."""


class RecordedResponse(NamedTuple):
    """One recorded response for the followers."""

    response: InferenceResponse
    final: bool


def key_of(request: InferenceRequest) -> IdempotencyKey | None:
    """Return the idempotency key of ``request`` or None; a request parameter takes precedence over the header field."""
    if request.caused:
        return None
    own = request.header.parameters.get(NAME)
    return request.header.idempotency_key if own is None else IdempotencyKey(own)  # type: ignore[arg-type]


class IdempotencyRegistry:
    """Joins requests with the same idempotency key; one per server. Used from the loop's thread only."""

    def __init__(self, limits: RetentionLimits, loop: asyncio.AbstractEventLoop) -> None:
        self._answers: KeyedResponses[SharedResponse] = KeyedResponses(limits)
        self._loop = loop
        self._timer = LoopTimer(loop, self._wake)

    def follow(self, limits: RetentionLimits) -> None:
        """Apply new limits."""
        self._answers.follow(limits)

    def ask(self, request: InferenceRequest, key: IdempotencyKey, entry: IdempotentQueue) -> None:
        """Let ``request`` follow the answer to its key. For the first request with a key, queue a carrier request."""
        try:
            answer = self._answer(request, key.checked(), entry)
        except NeriteError as error:
            request.respond(InferenceResponse.failed(error))
            return
        follower = answer.followed_by(request)
        deadline = deadline_of(request)
        if deadline is not None:
            left = max(0, deadline - monotonic_ns()) / 1e9
            follower.timer = self._loop.call_later(left, self._too_late, answer, follower, deadline)
        if answer.carrier is not None or answer.complete:
            self._loop.call_soon(answer.go_on, follower)
            entry.joined(request)
            return
        header = _carrier_header(request.header, self._answers.limits.grace_ns)
        answer.carrier = type(request)(header, request.data, answer, request.arrived_ns, request.id)
        entry.submit_carrier(answer.carrier)

    def _answer(self, request: InferenceRequest, key: IdempotencyKey, entry: IdempotentQueue) -> SharedResponse:
        """Return the answer that a request follows. Raises ``NeriteError``."""
        header = request.header
        if request.shares_memory:
            raise Unsupported(
                f"a request with tensors in shared memory cannot have an idempotency key ('{key.text}'): the memory "
                "may disappear with its client. Send the tensors in the request, or omit the key"
            )
        model = entry.model
        question = (key.parts, header.model_version, CacheKeys(()).of(request))
        asked = SharedResponse((model, caller_of(request).tenant, key.text, key.part), question, entry, self)
        answer = self._answers.ask(asked)
        if answer is None:
            raise KeyReused(
                f"the idempotency key '{key.text}' belongs to a different request to model '{model}': use a new key "
                "for each request, and the same key only for its retries"
            )
        return answer

    def let_go(self, entry: IdempotentQueue | None = None) -> None:
        """Stop keeping incomplete answers of ``entry``, which drains; cancel each once it has no followers.

        None: those of all entries, because the server is shutting down.
        """
        for answer in [each for each in self._answers if entry in (None, each.entry) and not each.complete]:
            self._answers.give_up(answer)
            if not answer.following and answer.carrier is not None:
                answer.carrier.cancel()
        if entry is None:
            self.follow(RetentionLimits(grace_ns=0))

    # Events of answers

    def said(self, answer: SharedResponse, size: int) -> None:
        """Record that an answer has grown by ``size`` bytes."""
        self._answers.grew(answer, size)

    def ended(self, answer: SharedResponse, *, failed: bool) -> None:
        """Record that an answer is complete."""
        self._answers.ended(answer, monotonic_ns(), failed=failed)
        answer.carrier = None
        self._timer.set(self._answers.next_time())

    def left(self, answer: SharedResponse) -> None:
        """Record that a follower has gone."""
        carrier = answer.carrier
        if self._answers.left(answer, monotonic_ns()):
            if carrier is not None:
                carrier.cancel()
        else:
            self._timer.set(self._answers.next_time())

    def soon(self, call: Callable[[ResponseFollower], None], follower: ResponseFollower) -> None:
        """Call ``call`` in the next turn of the loop."""
        self._loop.call_soon(call, follower)

    def _too_late(self, answer: SharedResponse, follower: ResponseFollower, deadline: int) -> None:
        arrived = follower.request.arrived_ns
        answer.leave(
            follower.request, refusals.late_refusal(deadline - arrived, float(monotonic_ns() - arrived)).as_error()
        )

    def _wake(self) -> None:
        """Cancel the answers whose grace period ended before a client came back."""
        for answer in self._answers.due(monotonic_ns()):
            if answer.carrier is not None:
                answer.carrier.cancel()
        self._timer.set(self._answers.next_time())


class ResponseFollower:
    """A client's request, and how many of the responses it has received."""

    __slots__ = ("awaited", "had", "paused", "request", "timer")

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.had = 0
        self.paused = False
        self.awaited = True
        """Sending continues in a later turn of the loop."""
        self.timer: asyncio.TimerHandle | None = None


class SharedResponse(KeyedResponse, ExecutionObserver):
    """Sink of a carrier request that records the responses and fans them out to all followers.

    A slow follower does not delay the others. While the answer is kept, backpressure reaches the model only if all
    followers are paused.
    """

    __slots__ = ("_followers", "_idempotency", "_responses", "carrier", "entry")

    def __init__(
        self, key: tuple[object, ...], question: object, entry: IdempotentQueue, idempotency: IdempotencyRegistry
    ) -> None:
        super().__init__(key, question)
        self.entry = entry
        """Queue that the carrier was submitted to."""
        self.carrier: InferenceRequest | None = None
        """The queued request; None before it is queued and after it is over."""
        self._idempotency = idempotency
        self._followers: dict[InferenceRequest, ResponseFollower] = {}
        self._responses: list[RecordedResponse] = []
        """All responses; once the answer is no longer kept, those that a follower has not received."""

    def followed_by(self, request: InferenceRequest) -> ResponseFollower:
        """Add a follower that starts at the first response."""
        follower = self._followers[request] = ResponseFollower(request)
        follower.awaited = self.carrier is not None or self.complete
        request.on_cancel = self._cancelled
        request.on_pause = self._paused
        return follower

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Record a response and forward it to the followers."""
        try:
            self._take(request, response, final)
        except Exception as error:
            failure = report("admission", error, "of a request with an idempotency key", request.id)
            for follower in list(self._followers.values()):
                follower.request.respond(InferenceResponse.failed(failure))
                self._forget(follower)

    def _take(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        # Copy the data: its memory will be reused.
        kept = InferenceResponse(response.header, [bytes(each) for each in response.buffers], response.error)
        before = self._responses[-1].response.header if self._responses else None
        self._responses.append(RecordedResponse(kept, final))
        self._idempotency.said(self, _size_of(kept, before))
        if final:
            self._idempotency.ended(self, failed=response.error is not None)
        for follower in list(self._followers.values()):
            if not follower.awaited:
                self.go_on(follower)
        if not final and self._must_pause:
            request.pause(True)

    def go_on(self, follower: ResponseFollower) -> None:
        """Send a follower the responses it has not received, until it pauses."""
        request = follower.request
        follower.awaited = False
        for _ in range(_AT_ONCE):
            if follower.paused or request.finished or follower.had == len(self._responses):
                break
            response, final = self._responses[follower.had]
            follower.had += 1
            request.respond(response, final)
            if final:
                self._forget(follower)
        else:
            follower.awaited = True
            self._idempotency.soon(self.go_on, follower)
        if not self.kept:
            self._trim()

    def leave(self, request: InferenceRequest, error: NeriteError) -> None:
        """Answer a follower with ``error`` and remove it."""
        follower = self._followers.get(request)
        if follower is not None:
            request.respond(InferenceResponse.failed(error))
            self._forget(follower)
            self._resume()

    def _cancelled(self, request: InferenceRequest) -> None:
        self.leave(request, Cancelled(""))

    def _forget(self, follower: ResponseFollower) -> None:
        del self._followers[follower.request]
        if follower.timer is not None:
            follower.timer.cancel()
        self._idempotency.left(self)

    def _paused(self, request: InferenceRequest, paused: bool) -> None:
        follower = self._followers[request]
        follower.paused = paused
        if not paused and not follower.awaited:
            follower.awaited = True  # not synchronously: the caller may be in the middle of an operation
            self._idempotency.soon(self.go_on, follower)
        self._resume()

    def _resume(self) -> None:
        """Pause or resume the model according to the state of the followers."""
        if self.carrier is not None:
            self.carrier.pause(self._must_pause)

    @property
    def _must_pause(self) -> bool:
        """Whether backpressure from the followers must reach the model."""
        waits = [each.paused for each in self._followers.values()]
        return bool(waits) and (all(waits) if self.kept else any(waits))

    def _trim(self) -> None:
        """Drop the responses that all followers have received."""
        followers = self._followers.values()
        had = min([each.had for each in followers], default=len(self._responses))
        del self._responses[:had]
        for each in followers:
            each.had -= had

    # Notifications of executions, forwarded to the followers' sinks

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the notification to all observers."""
        for observer, each in self._observers():
            observer.ran(each, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the notification to all observers."""
        for observer, each in self._observers():
            observer.parted(each, timings)

    def _observers(self) -> list[tuple[ExecutionObserver, InferenceRequest]]:
        return [(each.sink, each) for each in self._followers if isinstance(each.sink, ExecutionObserver)]


def _size_of(kept: InferenceResponse, before: ResponseHeader | None) -> int:
    """Return the bytes that a response takes. A header shared with the previous response is counted once."""
    size = _OVERHEAD + sum(map(len, kept.data))
    if kept.header is not None and kept.header is not before:
        size += headers.response_header_bytes(kept.header)
    return size


def _carrier_header(header: RequestHeader, grace_ns: int) -> RequestHeader:
    """Return the header of the carrier, with timeouts extended by the grace period for clients that come back."""
    caller, timeout_us = header.caller, header.timeout_us
    if caller is not None and caller.patience_ns:
        caller = caller._replace(patience_ns=caller.patience_ns + grace_ns)
    if timeout_us:
        timeout_us += grace_ns // 1000
    return header.changed(caller=caller, timeout_us=timeout_us)


class IdempotentQueue(FrontStage):
    """First stage of a version whose engine generates tokens; diverts requests that have an idempotency key.

    It is in front of the response cache, too: a key is kept whether the model or the cache answered, and a request that
    reuses the key of a different one is rejected even if the cache has an answer. Used from the loop's thread only.
    """

    held = ()
    """A request with a key waits as its carrier in the following stages."""

    def __init__(
        self, following: QueueStage, controller: AdmissionController, idempotency: IdempotencyRegistry
    ) -> None:
        """``controller`` counts the requests that join another."""
        super().__init__(following)
        self._controller = controller
        self._idempotency = idempotency
        self.on_joined: Callable[[InferenceRequest], object] = bool
        """Called with each request that joined another."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._controller.model

    def submit(self, request: InferenceRequest) -> None:
        """Enqueue a request, or let it join one with the same key."""
        key = key_of(request)
        if key is None:
            self._following.submit(request)
        else:
            self._idempotency.ask(request, key, self)

    def submit_carrier(self, carrier: InferenceRequest) -> None:
        """Enqueue the request that runs for all requests with its key."""
        self._following.submit(carrier)

    def joined(self, request: InferenceRequest) -> None:
        """Count a request that joined another."""
        caller = caller_of(request)
        self._controller.joined(caller.tenant, caller.wanted_class)
        self.on_joined(request)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call ``call`` once no request waits or runs, possibly at once. No further requests may be submitted."""
        self._idempotency.let_go(self)
        super().when_drained(call)

    def _refuse_held(self, error: NeriteError) -> None:
        """Do nothing: the carriers are refused in the following stages."""
