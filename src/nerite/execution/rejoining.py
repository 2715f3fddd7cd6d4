"""Requests with an idempotency key: who asks once more, because a connection broke, gets the answer that is under way.

Such a request is not queued itself. Another one is made for it, which nobody can cancel by going away, and whoever asks
with its key follows that: gets all that was said so far, and then what is said. What is kept, and for how long, is
decided by ``KeyedAnswers``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from nerite.cache.key import Keys
from nerite.core import footprint
from nerite.core.errors import Cancelled, KeyReused, NeriteError, Unsupported
from nerite.core.idempotency_key import NAME, IdempotencyKey
from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.witness import Witness
from nerite.execution.alarm import Alarm
from nerite.execution.turnstile import caller_of, deadline_of
from nerite.scheduling.keyed_answers import KeyedAnswer, KeyedAnswers
from nerite.scheduling.tokens import reasons
from nerite.scheduling.tokens.policy import KeepLimits

if TYPE_CHECKING:
    from nerite.execution.keyed_queue import KeyedQueue

_now = time.monotonic_ns
_AT_ONCE: Final = 32
"""Responses that somebody who joins gets in one turn of the loop, which others wait for."""
_OVERHEAD: Final = 512
"""Bytes that a response takes beside its header and its data, about."""


class Said(NamedTuple):
    """One response to those who follow."""

    response: InferenceResponse
    final: bool


def key_of(request: InferenceRequest) -> IdempotencyKey | None:
    """Return the key that a client gave to ``request``; None if there is none. A request's own counts first."""
    if request.caused:
        return None
    own = request.header.parameters.get(NAME)
    return request.header.idempotency_key if own is None else IdempotencyKey(own)  # type: ignore[arg-type]


class Rejoining:
    """One for the server. For the loop's thread only."""

    def __init__(self, limits: KeepLimits, loop: asyncio.AbstractEventLoop) -> None:
        self._answers: KeyedAnswers[SharedAnswer] = KeyedAnswers(limits)
        self._loop = loop
        self._alarm = Alarm(loop, self._wake)

    def follow(self, limits: KeepLimits) -> None:
        """Go on by other limits."""
        self._answers.follow(limits)

    def ask(self, request: InferenceRequest, key: IdempotencyKey, entry: KeyedQueue) -> None:
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

    def _answer(self, request: InferenceRequest, key: IdempotencyKey, entry: KeyedQueue) -> SharedAnswer:
        """Return what a request follows. Raises ``NeriteError``."""
        header = request.header
        if header.shared:
            raise Unsupported(
                f"a request with tensors in shared memory cannot have an idempotency key, as '{key.text}': its client "
                "may go, and the memory with it. Send the tensors in the request, or leave the key out"
            )
        model = entry.model
        question = (key.parts, header.model_version, Keys(()).of(request))
        asked = SharedAnswer((model, caller_of(request).tenant, key.text, key.part), question, entry, self)
        answer = self._answers.ask(asked)
        if answer is None:
            raise KeyReused(
                f"the idempotency key '{key.text}' is that of another request to model '{model}': each request has a "
                "key of its own, and keeps it when it is sent again"
            )
        return answer

    def let_go(self, entry: KeyedQueue | None = None) -> None:
        """Stop what nobody follows behind an entry that is not asked any more, and the rest as soon as nobody does.

        None: any of them, as the server stops.
        """
        for answer in [each for each in self._answers if entry in (None, each.entry) and not each.complete]:
            self._answers.give_up(answer)
            if not answer.following and answer.carrier is not None:
                answer.carrier.cancel()
        if entry is None:
            self.follow(KeepLimits(grace_ns=0))

    # What becomes of answers

    def said(self, answer: SharedAnswer, size: int) -> None:
        """Take note that there is more of an answer."""
        self._answers.grew(answer, size)

    def ended(self, answer: SharedAnswer, *, failed: bool) -> None:
        """Take note that an answer is complete."""
        self._answers.ended(answer, _now(), failed=failed)
        answer.carrier = None
        self._alarm.set(self._answers.next_time())

    def left(self, answer: SharedAnswer) -> None:
        """Take note that one is gone who followed."""
        carrier = answer.carrier
        if self._answers.left(answer, _now()):
            if carrier is not None:
                carrier.cancel()
        else:
            self._alarm.set(self._answers.next_time())

    def soon(self, call: Callable[[Follower], None], follower: Follower) -> None:
        """Have something done in the next turn of the loop."""
        self._loop.call_soon(call, follower)

    def _too_late(self, answer: SharedAnswer, follower: Follower, deadline: int) -> None:
        arrived = follower.request.arrived_ns
        answer.leave(follower.request, reasons.late(deadline - arrived, float(_now() - arrived)).as_error())

    def _wake(self) -> None:
        """Stop what nobody came back for."""
        for answer in self._answers.due(_now()):
            if answer.carrier is not None:
                answer.carrier.cancel()
        self._alarm.set(self._answers.next_time())


class Follower:
    """A client's request, and how much of the answer it has had."""

    __slots__ = ("awaited", "had", "paused", "request", "timer")

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.had = 0
        self.paused = False
        self.awaited = True
        """It goes on in another turn of the loop."""
        self.timer: asyncio.TimerHandle | None = None


class SharedAnswer(KeyedAnswer, Witness):
    """The sink of the request that is queued, for all that follow it. Who reads slowly has the others wait for nothing.

    As long as it is kept the model does not wait either, but for the one who follows alone.
    """

    __slots__ = ("_followers", "_rejoining", "_said", "carrier", "entry")

    def __init__(self, key: tuple[object, ...], question: object, entry: KeyedQueue, rejoining: Rejoining) -> None:
        super().__init__(key, question)
        self.entry = entry
        """Where the carrier was queued."""
        self.carrier: InferenceRequest | None = None
        """What was queued, until it is over."""
        self._rejoining = rejoining
        self._followers: dict[InferenceRequest, Follower] = {}
        self._said: list[Said] = []
        """Everything; of what is not kept any more, what somebody has not had."""

    def followed_by(self, request: InferenceRequest) -> Follower:
        """Have one more who follows, from the beginning."""
        follower = self._followers[request] = Follower(request)
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
        self._said.append(Said(kept, final))
        self._rejoining.said(self, _size_of(kept, before))
        if final:
            self._rejoining.ended(self, failed=response.error is not None)
        for follower in list(self._followers.values()):
            if not follower.awaited:
                self.go_on(follower)
        if not final and self._enough:
            request.pause(True)

    def go_on(self, follower: Follower) -> None:
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
            self._rejoining.soon(self.go_on, follower)
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

    def _forget(self, follower: Follower) -> None:
        del self._followers[follower.request]
        if follower.timer is not None:
            follower.timer.cancel()
        self._rejoining.left(self)

    def _paused(self, request: InferenceRequest, paused: bool) -> None:
        follower = self._followers[request]
        follower.paused = paused
        if not paused and not follower.awaited:
            follower.awaited = True  # not now: whoever says so may be in the middle of something
            self._rejoining.soon(self.go_on, follower)
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

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        for witness, each in self._witnesses():
            witness.ran(each, marks)

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Pass it on."""
        for witness, each in self._witnesses():
            witness.parted(each, marks)

    def _witnesses(self) -> list[tuple[Witness, InferenceRequest]]:
        return [(each.sink, each) for each in self._followers if isinstance(each.sink, Witness)]


def _size_of(kept: InferenceResponse, before: ResponseHeader | None) -> int:
    """Return the bytes that a response takes. Mostly its header is that of the one before, which counts once."""
    size = _OVERHEAD + sum(map(len, kept.data))
    if kept.header is not None and kept.header is not before:
        size += footprint.of_response_header(kept.header)
    return size


def _lasting(header: RequestHeader, grace_ns: int) -> RequestHeader:
    """Return the header of what is queued: where its client gives up somebody may still come."""
    caller, timeout_us = header.caller, header.timeout_us
    if caller is not None and caller.patience_ns:
        caller = caller._replace(patience_ns=caller.patience_ns + grace_ns)
    if timeout_us:
        timeout_us += grace_ns // 1000
    return header.changed(caller=caller, timeout_us=timeout_us)
