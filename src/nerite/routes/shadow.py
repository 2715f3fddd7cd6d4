"""Sends a share of the requests of a route to its shadow once they are answered, and has both answers compared.

A request is recorded by a sink in front of its caller's, and waits for the shadow only after the caller has its answer,
so nothing that the shadow does can delay or fail it. Inputs and answers are kept by reference; what they keep in memory
is bounded by ``ShadowQueue``. For the loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic_ns
from typing import Any, Final, Protocol

from nerite.core.byte_budget import ROUTES, Memo
from nerite.core.errors import Cancelled, NeriteError
from nerite.core.execution_observer import CallerSink
from nerite.core.failures import report
from nerite.core.headers import request_header_bytes
from nerite.core.request import (
    MIXED,
    InferenceRequest,
    RequestedOutput,
    RequestHeader,
    RequestRoute,
)
from nerite.core.response import InferenceResponse
from nerite.core.servable_version import ServableVersion
from nerite.core.tensor import Buffer
from nerite.dispatch.busy_poll import LoopTimer
from nerite.judge.answers import Answer, compare_answers
from nerite.observability.log import log
from nerite.routes.observation import kind_of
from nerite.routes.shadow_results import ShadowResults
from nerite.routes.shadow_samples import ShadowSamples, sample_of
from nerite.scheduling.shadow_queue import ShadowDrop, ShadowQueue
from nerite.scheduling.weighted_route import RouteArm, RouteShadow

_RETRY_NS: Final = 20_000_000
"""Time after which the shadow is looked at again while other requests wait there."""
_SAMPLED: Final = 1024
"""Bytes of an input by which a change of it is noticed."""
_MAX_COPIED: Final = 1 << 20
"""Maximum number of bytes of inputs that are copied, for a model that changes its inputs in place."""
_ENTRY: Final = 64
"""Bytes of an entry of the memo without the headers."""


class ShadowVersion(ServableVersion, Protocol):
    """A loaded version that requests of a route may be sent to, too."""

    @property
    def pending(self) -> int:
        """Number of requests that wait for an instance."""

    @property
    def lowest_priority(self) -> int:
        """The priority of requests that nobody waits for; 0 if the model has no priorities."""


FindShadow = Callable[[str, str, str], ShadowVersion]
"""Returns the running version of a model, version and namespace. Raises ``NeriteError``."""


class ShadowRequest(InferenceRequest):
    """A request to a shadow, whose answer nobody gets."""

    __slots__ = ("item", "version")

    background = True

    item: ShadowedRequest
    version: ShadowVersion


class ShadowedRequest(CallerSink):
    """A request that was chosen for the shadow, from its arrival to the comparison.

    The sink in front of the caller's, which records what the caller gets.
    """

    __slots__ = (
        "_shadow",
        "answer",
        "arm",
        "data",
        "drop",
        "ended",
        "fingerprint",
        "header",
        "held",
        "id",
        "shadow_answer",
        "size",
    )

    def __init__(
        self, shadow: RunningShadow, request: InferenceRequest, arm: str, data: Sequence[Buffer], size: int
    ) -> None:
        """``data`` are the inputs that the shadow gets."""
        super().__init__(request.sink)
        self._shadow = shadow
        self.arm = arm
        """Label of the arm that it was assigned to."""
        self.header = request.header
        self.id = request.id
        self.data = data
        self.fingerprint = _fingerprint(data)
        self.size = size
        """Bytes that are held for it."""
        self.answer = Answer()
        self.shadow_answer = Answer()
        self.drop: ShadowDrop | None = None
        """Why it is not compared."""
        self.held = True
        """It has its place in the queue."""
        self.ended = False
        """The caller has the answer."""
        request.sink = self

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and record it."""
        if self.drop is None:
            self._shadow.record(self, self.answer, response)
        if not final:
            self._sink.respond(request, response, final)
            return
        self.answer.latency_us = (monotonic_ns() - request.arrived_ns) / 1e3
        try:
            self._sink.respond(request, response, final)
        finally:
            self._shadow.answered(self, request)


class ShadowSink:
    """Records what the shadow answers."""

    __slots__ = ("_shadow",)

    protocol = ""

    def __init__(self, shadow: RunningShadow) -> None:
        self._shadow = shadow

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Record a response."""
        assert isinstance(request, ShadowRequest)
        item = request.item
        if item.drop is None:
            self._shadow.record(item, item.shadow_answer, response)
            if item.drop is not None and not final:  # it has become too large
                request.cancel()
        if final:
            self._shadow.ended(request)

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return what distinguishes the request in traces."""
        return {"nerite.shadow_of": self._shadow.route}


class RunningShadow:
    """The shadow of a route. Keeps its results while weights change."""

    def __init__(
        self,
        route: str,
        settings: RouteShadow,
        find: FindShadow,
        loop: asyncio.AbstractEventLoop,
        coin: Random,
        samples: ShadowSamples | None,
    ) -> None:
        self.route = route
        self.settings = settings
        self.results = ShadowResults()
        self._label = settings.arm.label
        self._find = find
        self._loop = loop
        self._coin = coin.random
        self._samples = samples
        self._queue: ShadowQueue[ShadowedRequest] = ShadowQueue(settings.concurrency, int(settings.timeout * 1e9))
        self._running: dict[ShadowRequest, int] = {}
        """Requests that the shadow has, and when each is cancelled; in the order of these times."""
        self._headers: Memo[RequestHeader, RequestHeader] = Memo()
        self._timer = LoopTimer(loop, self._look)
        self._looks_soon = False
        self._copies = False
        """The model has changed its inputs in place, so they are copied."""
        self._sink = ShadowSink(self)
        self._stopped = False

    def status(self) -> dict[str, Any]:
        """Return what the comparisons have shown so far."""
        settings, samples, queue = self.settings, self._samples, self._queue
        return {
            "arm": self._label,
            "share": settings.share,
            "tolerance": settings.tolerance,
            **self.results.as_json(),
            "held": queue.held,
            "held_bytes": queue.size,
            "waiting": queue.waiting,
            "running": len(self._running),
            "samples": "" if samples is None else str(samples.path),
        }

    # From the arrival of a request to its answer

    def begin(self, request: InferenceRequest, arm: str) -> None:
        """Record a request to the arm with the label ``arm``, if it is chosen. Never raises.

        Its header is still that of the route.
        """
        if arm != self._label and not self._stopped and self._coin() < self.settings.share:
            try:
                self._begin(request, arm)
            except Exception as error:
                report("admission", error, f"while a request to route '{self.route}' was recorded for its shadow")

    def _begin(self, request: InferenceRequest, arm: str) -> None:
        if request.header.sequence_id:
            self.results.drop(ShadowDrop.SEQUENCE)
            return
        if request.on_device:
            self.results.drop(ShadowDrop.ON_DEVICE)
            return
        size = sum(map(len, request.data))
        refusal = self._queue.hold(size)
        if refusal is None and self._copies and size > _MAX_COPIED:
            self._queue.release(size)
            refusal = ShadowDrop.CHANGED
        if refusal is not None:
            self.results.drop(refusal)
            return
        data = [bytearray(each) for each in request.buffers] if self._copies else request.buffers
        ShadowedRequest(self, request, arm, data, size)

    def record(self, item: ShadowedRequest, answer: Answer, response: InferenceResponse) -> None:
        """Keep a response of either of both."""
        if response.error is not None:
            answer.error = response.error
        elif response.header is not None:
            size = sum(map(len, response.data))
            if self._queue.grow(size):
                item.size += size
                answer.responses.append(response)
            else:
                self._dismiss(item, ShadowDrop.BYTES)

    def answered(self, item: ShadowedRequest, request: InferenceRequest) -> None:
        """Enqueue a request whose caller has the answer. Never raises."""
        if item.ended:
            return  # the sink behind has failed, and is told of that
        item.ended = True
        try:
            self._answered(item, request)
        except Exception as error:
            report("admission", error, f"while a request to route '{self.route}' was recorded for its shadow")
            self._dismiss(item, ShadowDrop.STOPPED)

    def _answered(self, item: ShadowedRequest, request: InferenceRequest) -> None:
        header = request.header
        if self._stopped:
            self._dismiss(item, ShadowDrop.STOPPED)
        elif request.cancelled or isinstance(item.answer.error, Cancelled):
            self._dismiss(item, ShadowDrop.CANCELLED)
        elif RouteArm(header.model_name, header.model_version).label == self._label:
            self._release(item)  # it was handed over to the shadow's own version
        elif item.drop is None and item.fingerprint != _fingerprint(item.data):
            self._dismiss(item, ShadowDrop.CHANGED)
            self._copy_inputs()
        elif item.drop is None:
            self._queue.wait(item, monotonic_ns())
            self._look_soon()

    def _copy_inputs(self) -> None:
        if not self._copies:
            self._copies = True
            log.warning(
                f"route '{self.route}': the model changes its inputs in place, so inputs of up to {_MAX_COPIED} bytes "
                "are copied for the shadow, and larger ones are not sent to it. Let the model copy an input before it "
                "changes it"
            )

    def _dismiss(self, item: ShadowedRequest, reason: ShadowDrop) -> None:
        """Forget a request, and count why."""
        self._drop(item, reason)
        self._release(item)

    def _drop(self, item: ShadowedRequest, reason: ShadowDrop) -> None:
        """Count why a request will not be compared."""
        if item.drop is None:
            item.drop = reason
            self.results.drop(reason)

    def _release(self, item: ShadowedRequest) -> None:
        """Give up the place of a request, and what is kept of it."""
        if item.held:
            item.held = False
            self._queue.release(item.size)
            item.data = ()
            item.answer = item.shadow_answer = Answer()

    # From the answer to the comparison

    def _look_soon(self) -> None:
        if not self._looks_soon:
            self._looks_soon = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Send requests that wait, and cancel those that take too long."""
        self._looks_soon = False
        now = monotonic_ns()
        for request, deadline in list(self._running.items()):
            if deadline > now:
                break
            self._drop(request.item, ShadowDrop.TIMEOUT)
            request.cancel()
        for item in self._queue.late(now):
            self._dismiss(item, ShadowDrop.LATE)
        if self._queue.waiting:
            self._send_waiting(now)
        wakes = [deadline for deadline in self._running.values() if deadline > now][:1]
        if self._queue.waiting:
            wakes.append(now + _RETRY_NS)
        self._timer.set(min(wakes, default=None))

    def _send_waiting(self, now: int) -> None:
        arm = self.settings.arm
        while (item := self._queue.first) is not None:
            try:
                version = self._find(arm.model, arm.version, item.header.namespace)
                usable = version.usable
            except NeriteError:
                usable = False
            if not usable:
                for each in self._queue.drain():
                    self._dismiss(each, ShadowDrop.NOT_READY)
            elif version.pending > sum(not version.begun(request) for request in self._running):
                return  # others wait there, and somebody waits for them
            else:
                self._queue.begin()
                self._send(item, version, now)

    def _send(self, item: ShadowedRequest, version: ShadowVersion, now: int) -> None:
        try:
            header = self._header(item.header, version, item.id)
        except NeriteError as error:
            self._queue.end()
            item.shadow_answer.error = error.without_frames()
            self._loop.call_soon(self._compare, item, version)
            return
        request = ShadowRequest(header, item.data, self._sink, now, item.id)
        request.item, request.version = item, version
        self._running[request] = now + int(self.settings.timeout * 1e9)
        self.results.requests += 1
        try:
            version.submit(request)
        except Exception as error:
            failure = report("admission", error, f"of a request to the shadow of route '{self.route}'", request.id)
            request.respond(InferenceResponse.failed(failure))

    def _header(self, own: RequestHeader, version: ShadowVersion, request_id: str) -> RequestHeader:
        """Return the header for the shadow, without what is the caller's: priority, quota, key, destinations.

        Raises Triton's errors.
        """
        header = self._headers.get(own)
        if header is None or header.route is None or header.route.version is not version:
            arm = self.settings.arm
            header = own.readdressed(arm.model, arm.version, None).changed(
                outputs=tuple(RequestedOutput(output.name) for output in own.outputs),
                caller=MIXED,  # the response cache neither answers it nor keeps its answer
                idempotency_key=None,
                sticky_fields=None,
                priority=version.lowest_priority,
                timeout_us=0,
                classifies=False,
                shared=False,
            )
            version.signature.bind(header, request_id)
            header.route = RequestRoute(None, version)
            ROUTES.put(self._headers, own, header, _ENTRY + 2 * request_header_bytes(own))
        return header

    def ended(self, request: ShadowRequest) -> None:
        """Compare the answers to a request that the shadow has ended."""
        item = request.item
        del self._running[request]
        self._queue.end()
        item.shadow_answer.latency_us = (monotonic_ns() - request.arrived_ns) / 1e3
        how = kind_of(item.shadow_answer.error, cancelled=request.cancelled)
        if how in ("cancelled", "refused"):
            self._drop(item, ShadowDrop.STOPPED if how == "cancelled" else ShadowDrop.REFUSED)
        if item.drop is not None:
            self._release(item)
        else:
            self._loop.call_soon(self._compare, item, request.version)
        if self._queue.waiting:
            self._look_soon()

    def _compare(self, item: ShadowedRequest, version: ShadowVersion) -> None:
        """Compare both answers, in a turn of the loop of its own."""
        try:
            labelled = [name for name, output in version.signature.outputs.items() if output.labels]
            comparison = compare_answers(
                item.answer, item.shadow_answer, tolerance=self.settings.tolerance, labelled=labelled
            )
            self.results.take(comparison, item.shadow_answer.latency_us - item.answer.latency_us)
            if self._samples is not None:
                inputs = (item.header.inputs, item.data) if self.settings.contents else None
                self._samples.add(
                    sample_of(self.route, item.arm, self._label, item.answer, item.shadow_answer, comparison, inputs)
                )
        except Exception as error:
            report("loop", error, f"while answers of route '{self.route}' and its shadow were compared")
        self._release(item)

    def stop(self) -> None:
        """Send nothing any more, and cancel what the shadow has."""
        self._stopped = True
        self._timer.set(None)
        for item in self._queue.drain():
            self._dismiss(item, ShadowDrop.STOPPED)
        if self._samples is not None:
            self._samples.close()
        for request in list(self._running):
            self._drop(request.item, ShadowDrop.STOPPED)
            request.cancel()


def _fingerprint(data: Sequence[Buffer]) -> int:
    """Return a hash of some bytes of each input."""
    # An odd step, so that all bytes of numbers are among them.
    return hash(tuple(bytes(memoryview(each)[:: len(each) // _SAMPLED | 1]) for each in data))
