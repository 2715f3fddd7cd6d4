"""Requests with an idempotency key: who asks once more, because a connection broke, gets the answer that is under way.

Such a request is not queued itself. Another one is made for it, which nobody can cancel by going away, and whoever asks
with its key follows that: gets all that was said so far, and then what is said. What is kept, and for how long, is
decided by ``KeyedResponses``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from nerite.admission import refusals
from nerite.admission.controller import AdmissionController
from nerite.admission.policy import RetentionLimits
from nerite.admission.queue import caller_of, deadline_of
from nerite.cache.frontend import CacheKeys, RequestQueueInterface
from nerite.core import headers
from nerite.core.errors import Cancelled, KeyReused, NeriteError, Unsupported
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import NAME, IdempotencyKey, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.dispatch.busy_poll import LoopTimer

# Which answers are kept for who asks once more with the same key, and for how long.
#
# An answer is there from the first question on. While somebody follows it, it goes on; when the last one is gone, it
# goes on for a time of grace, and so long it is kept when it is complete. Somebody who asks the same with its key
# within that time follows it, too. Who asks something else with its key is told so.
#
# What is kept is bounded: of complete answers the oldest go first. An answer under way that is too long by itself is
# given up: whoever follows it goes on, and nobody joins them any more.

_SPARE: Final = 64
"""Ends of times of grace that count no more, which are kept beside as many as there are answers."""


class KeyedResponse:
    """One answer. ``KeyedResponses`` keeps the books on it, others read."""

    __slots__ = ("complete", "following", "kept", "key", "question", "size", "until")

    def __init__(self, key: Hashable, question: object) -> None:
        self.key = key
        self.question = question
        """Equal for those who ask the same."""
        self.following = 0
        """How many get it."""
        self.complete = False
        self.kept = False
        """Others may still join."""
        self.size = 0
        """Bytes of it that are kept."""
        self.until: int | None = None
        """The end of its grace; None while somebody follows what is not complete."""


A = TypeVar("A", bound=KeyedResponse)


class KeyedResponses(Generic[A]):
    """Those of a server."""

    def __init__(self, limits: RetentionLimits) -> None:
        self.limits = limits
        self.size = 0
        """Bytes that are kept."""
        self._kept: dict[Hashable, A] = {}
        self._complete: dict[Hashable, A] = {}
        """Of those, the complete ones; the oldest first."""
        self._ends: list[tuple[int, int, Hashable]] = []
        """When times of grace end. An entry does not count whose answer has another by now."""
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[A]:
        return iter(self._kept.values())

    def ask(self, answer: A) -> A | None:
        """Return what is followed by somebody who asks for ``answer``: it, if it is new, or one from before.

        None: its key is that of another question.
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
        """Note that one is gone who followed; return whether the answer is to be stopped."""
        answer.following -= 1
        if answer.following or answer.complete:
            return False
        if not answer.kept or not self.limits.grace_ns:
            self.give_up(answer)
            return True
        self._grant(answer, now)
        return False

    def grew(self, answer: A, size: int) -> None:
        """Note that an answer has so many bytes more. It may be given up for that."""
        if not answer.kept:
            return
        answer.size += size
        self.size += size
        self._make_room()
        if self.size > self.limits.max_bytes:
            self.give_up(answer)

    def ended(self, answer: A, now: int, *, failed: bool) -> None:
        """Note that nothing more comes. What ``failed`` is no answer: who asks once more has it tried again."""
        answer.complete = True
        if not answer.kept:
            return
        if failed or not self.limits.grace_ns:
            self.give_up(answer)
            return
        self._complete[answer.key] = answer
        self._grant(answer, now)
        self._make_room()

    def give_up(self, answer: A) -> None:
        """Have nobody join any more: the next one with its key begins anew."""
        if answer.kept:
            answer.kept = False
            self.size -= answer.size
            del self._kept[answer.key]
            self._complete.pop(answer.key, None)

    def due(self, now: int) -> list[A]:
        """Forget what nobody came back for in time; return what of that is under way, and is to be stopped."""
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
        """Return when to ask ``due``; None: not before something else happens."""
        return self._ends[0][0] if self._ends else None

    def follow(self, limits: RetentionLimits) -> None:
        """Go on by other limits. A time of grace that has begun stays as it is."""
        self.limits = limits
        self._make_room()

    def _grant(self, answer: A, now: int) -> None:
        answer.until = now + self.limits.grace_ns
        heapq.heappush(self._ends, (answer.until, next(self._numbers), answer.key))
        if len(self._ends) > 2 * len(self._kept) + _SPARE:
            self._ends = [end for end in self._ends if (kept := self._kept.get(end[2])) and kept.until == end[0]]
            heapq.heapify(self._ends)

    def _make_room(self) -> None:
        """Forget complete answers, the oldest first, until the rest is not too much."""
        while self._complete and (len(self._complete) > self.limits.max_answers or self.size > self.limits.max_bytes):
            self.give_up(next(iter(self._complete.values())))


_now = time.monotonic_ns
_AT_ONCE: Final = 32
"""Responses that somebody who joins gets in one turn of the loop, which others wait for."""
_OVERHEAD: Final = 512
"""Bytes that a response takes beside its header and its data, about."""


class RecordedResponse(NamedTuple):
    """One response to those who follow."""

    response: InferenceResponse
    final: bool


def key_of(request: InferenceRequest) -> IdempotencyKey | None:
    """Return the key that a client gave to ``request``; None if there is none. A request's own counts first."""
    if request.caused:
        return None
    own = request.header.parameters.get(NAME)
    return request.header.idempotency_key if own is None else IdempotencyKey(own)  # type: ignore[arg-type]


class IdempotencyRegistry:
    """One for the server. For the loop's thread only."""

    def __init__(self, limits: RetentionLimits, loop: asyncio.AbstractEventLoop) -> None:
        self._answers: KeyedResponses[SharedResponse] = KeyedResponses(limits)
        self._loop = loop
        self._alarm = LoopTimer(loop, self._wake)

    def follow(self, limits: RetentionLimits) -> None:
        """Go on by other limits."""
        self._answers.follow(limits)

    def ask(self, request: InferenceRequest, key: IdempotencyKey, entry: IdempotentQueue) -> None:
        """Have ``request`` answered as the others of its key. For the first of them one of our own is queued."""
        try:
            answer = self._answer(request, key.checked(), entry)
        except NeriteError as error:
            request.respond(InferenceResponse.failed(error))
            return
        follower = answer.followed_by(request)
        deadline = deadline_of(request)
        if deadline is not None:
            left = max(0, deadline - _now()) / 1e9
            follower.timer = self._loop.call_later(left, self._too_late, answer, follower, deadline)
        if answer.carrier is not None or answer.complete:
            self._loop.call_soon(answer.go_on, follower)
            entry.joined(request)
            return
        header = _lasting(request.header, self._answers.limits.grace_ns)
        answer.carrier = type(request)(header, request.data, answer, request.arrived_ns, request.id)
        entry.queue.submit(answer.carrier)

    def _answer(self, request: InferenceRequest, key: IdempotencyKey, entry: IdempotentQueue) -> SharedResponse:
        """Return what a request follows. Raises ``NeriteError``."""
        header = request.header
        if header.shared:
            raise Unsupported(
                f"a request with tensors in shared memory cannot have an idempotency key, as '{key.text}': its client "
                "may go, and the memory with it. Send the tensors in the request, or leave the key out"
            )
        model = entry.model
        question = (key.parts, header.model_version, CacheKeys(()).of(request))
        asked = SharedResponse((model, caller_of(request).tenant, key.text, key.part), question, entry, self)
        answer = self._answers.ask(asked)
        if answer is None:
            raise KeyReused(
                f"the idempotency key '{key.text}' is that of another request to model '{model}': each request has a "
                "key of its own, and keeps it when it is sent again"
            )
        return answer

    def let_go(self, entry: IdempotentQueue | None = None) -> None:
        """Stop what nobody follows behind an entry that is not asked any more, and the rest as soon as nobody does.

        None: any of them, as the server stops.
        """
        for answer in [each for each in self._answers if entry in (None, each.entry) and not each.complete]:
            self._answers.give_up(answer)
            if not answer.following and answer.carrier is not None:
                answer.carrier.cancel()
        if entry is None:
            self.follow(RetentionLimits(grace_ns=0))

    # What becomes of answers

    def said(self, answer: SharedResponse, size: int) -> None:
        """Take note that there is more of an answer."""
        self._answers.grew(answer, size)

    def ended(self, answer: SharedResponse, *, failed: bool) -> None:
        """Take note that an answer is complete."""
        self._answers.ended(answer, _now(), failed=failed)
        answer.carrier = None
        self._alarm.set(self._answers.next_time())

    def left(self, answer: SharedResponse) -> None:
        """Take note that one is gone who followed."""
        carrier = answer.carrier
        if self._answers.left(answer, _now()):
            if carrier is not None:
                carrier.cancel()
        else:
            self._alarm.set(self._answers.next_time())

    def soon(self, call: Callable[[ResponseFollower], None], follower: ResponseFollower) -> None:
        """Have something done in the next turn of the loop."""
        self._loop.call_soon(call, follower)

    def _too_late(self, answer: SharedResponse, follower: ResponseFollower, deadline: int) -> None:
        arrived = follower.request.arrived_ns
        answer.leave(follower.request, refusals.late_refusal(deadline - arrived, float(_now() - arrived)).as_error())

    def _wake(self) -> None:
        """Stop what nobody came back for."""
        for answer in self._answers.due(_now()):
            if answer.carrier is not None:
                answer.carrier.cancel()
        self._alarm.set(self._answers.next_time())


class ResponseFollower:
    """A client's request, and how much of the answer it has had."""

    __slots__ = ("awaited", "had", "paused", "request", "timer")

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.had = 0
        self.paused = False
        self.awaited = True
        """It goes on in another turn of the loop."""
        self.timer: asyncio.TimerHandle | None = None


class SharedResponse(KeyedResponse, ExecutionObserver):
    """The sink of the request that is queued, for all that follow it. Who reads slowly has the others wait for nothing.

    As long as it is kept the model does not wait either, but for the one who follows alone.
    """

    __slots__ = ("_followers", "_idempotency", "_said", "carrier", "entry")

    def __init__(
        self, key: tuple[object, ...], question: object, entry: IdempotentQueue, idempotency: IdempotencyRegistry
    ) -> None:
        super().__init__(key, question)
        self.entry = entry
        """Where the carrier was queued."""
        self.carrier: InferenceRequest | None = None
        """What was queued, until it is over."""
        self._idempotency = idempotency
        self._followers: dict[InferenceRequest, ResponseFollower] = {}
        self._said: list[RecordedResponse] = []
        """Everything; of what is not kept any more, what somebody has not had."""

    def followed_by(self, request: InferenceRequest) -> ResponseFollower:
        """Have one more who follows, from the beginning."""
        follower = self._followers[request] = ResponseFollower(request)
        follower.awaited = self.carrier is not None or self.complete
        request.on_cancel = self._cancelled
        request.on_pause = self._paused
        return follower

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response, keep it, and pass it on."""
        try:
            self._take(request, response, final)
        except Exception as error:
            failure = report("admission", error, "of a request with an idempotency key", request.id)
            for follower in list(self._followers.values()):
                follower.request.respond(InferenceResponse.failed(failure))
                self._forget(follower)

    def _take(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        # A copy: the memory that it came in is used again.
        kept = InferenceResponse(response.header, [bytes(each) for each in response.data], response.error)
        before = self._said[-1].response.header if self._said else None
        self._said.append(RecordedResponse(kept, final))
        self._idempotency.said(self, _size_of(kept, before))
        if final:
            self._idempotency.ended(self, failed=response.error is not None)
        for follower in list(self._followers.values()):
            if not follower.awaited:
                self.go_on(follower)
        if not final and self._enough:
            request.pause(True)

    def go_on(self, follower: ResponseFollower) -> None:
        """Pass on what somebody has not had, as far as they take it."""
        request = follower.request
        follower.awaited = False
        for _ in range(_AT_ONCE):
            if follower.paused or request.finished or follower.had == len(self._said):
                break
            response, final = self._said[follower.had]
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
        """Answer one who followed with ``error``, and go on without them."""
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
            follower.awaited = True  # not now: whoever says so may be in the middle of something
            self._idempotency.soon(self.go_on, follower)
        self._resume()

    def _resume(self) -> None:
        """Have the model wait for those who follow, or go on."""
        if self.carrier is not None:
            self.carrier.pause(self._enough)

    @property
    def _enough(self) -> bool:
        """Those who follow want no more responses for now."""
        waits = [each.paused for each in self._followers.values()]
        return bool(waits) and (all(waits) if self.kept else any(waits))

    def _trim(self) -> None:
        """Drop what everybody has had."""
        followers = self._followers.values()
        had = min([each.had for each in followers], default=len(self._said))
        del self._said[:had]
        for each in followers:
            each.had -= had

    # What whoever follows wants to know of the execution

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        for observer, each in self._witnesses():
            observer.ran(each, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Pass it on."""
        for observer, each in self._witnesses():
            observer.parted(each, timings)

    def _witnesses(self) -> list[tuple[ExecutionObserver, InferenceRequest]]:
        return [(each.sink, each) for each in self._followers if isinstance(each.sink, ExecutionObserver)]


def _size_of(kept: InferenceResponse, before: ResponseHeader | None) -> int:
    """Return the bytes that a response takes. Mostly its header is that of the one before, which counts once."""
    size = _OVERHEAD + sum(map(len, kept.data))
    if kept.header is not None and kept.header is not before:
        size += headers.response_header_bytes(kept.header)
    return size


def _lasting(header: RequestHeader, grace_ns: int) -> RequestHeader:
    """Return the header of what is queued: where its client gives up somebody may still come."""
    caller, timeout_us = header.caller, header.timeout_us
    if caller is not None and caller.patience_ns:
        caller = caller._replace(patience_ns=caller.patience_ns + grace_ns)
    if timeout_us:
        timeout_us += grace_ns // 1000
    return header.changed(caller=caller, timeout_us=timeout_us)


# Before everything else of a version whose engine generates tokens: requests that have an idempotency key.
#
# Before its response cache, too: a key is kept whichever way its request was answered, and a request that has the key
# of another one is refused though the cache may have an answer to it.


class IdempotentQueue:
    """A queue that requests with a key go around, where another one has been made for them. For the loop's thread."""

    def __init__(
        self, queue: RequestQueueInterface, gate: AdmissionController, idempotency: IdempotencyRegistry
    ) -> None:
        """``gate`` counts those that join."""
        self.queue = queue
        self._gate = gate
        self._idempotency = idempotency

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._gate.model

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self.queue.pending

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self.queue.in_flight

    def submit(self, request: InferenceRequest) -> None:
        """RequestQueueInterface a request, or have it join one with the same key."""
        key = key_of(request)
        if key is None:
            self.queue.submit(request)
        else:
            self._idempotency.ask(request, key, self)

    def joined(self, request: InferenceRequest) -> None:
        """Count a request that joins another."""
        caller = caller_of(request)
        self._gate.joined(caller.tenant, caller.wanted_class)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now. No more requests come."""
        self._idempotency.let_go(self)
        self.queue.when_drained(call)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``."""
        self.queue.abandon(error)
