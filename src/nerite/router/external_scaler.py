"""KEDA's external scaler on the router's gRPC port: the number of members that a pool should have.

The metric is that number, and its target is 1, so that a HorizontalPodAutoscaler arrives at the number as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError, Message

from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.core.request import CancelReason
from nerite.core.text import quoted_text
from nerite.router.grpc_service import RefusedTarget
from nerite.router.scaling import RouterScaling, ScaledPool
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall, GrpcConnection
from nerite.transports.limits import ByteReservation
from nerite.wire import external_scaler as wire

SERVICE: Final = "/externalscaler.ExternalScaler/"
METRIC: Final = "nerite-members-wanted"
_KEY: Final = "pool"
_PREFIX_SIZE: Final = 5
_CALL_BYTES: Final = 16 * 1024


class ExternalScaler:
    """Answers KEDA from the autoscalers of the pools."""

    def __init__(self, scaling: RouterScaling) -> None:
        self._scaling = scaling
        self._answers: dict[str, Callable[[bytes], Message]] = {
            "IsActive": self._is_active,
            "GetMetricSpec": self._metric_spec,
            "GetMetrics": self._metrics,
        }

    def target(self, path: str) -> CallTarget | None:
        """Return the target of the calls to a path; None for an unknown method."""
        method = path.removeprefix(SERVICE)
        if method == "StreamIsActive":
            return ActivityTarget(ActivityFeed(self, self._scaling))
        answer = self._answers.get(method)
        return None if answer is None else ScalerTarget(answer)

    def pool(self, message: bytes) -> ScaledPool:
        """Return the pool of a ``ScaledObjectRef``. Raises ``NeriteError``."""
        return self._of(wire.ScaledObjectRef.FromString(message))

    def _of(self, reference: wire.ScaledObjectRef) -> ScaledPool:
        name = reference.scalerMetadata.get(_KEY, "")
        known = ", ".join(self._scaling.scaled) or "none"
        if not name:
            raise InvalidArgument(
                f"the trigger of ScaledObject '{quoted_text(reference.name)}' names no pool: "
                f"add '{_KEY}' to its metadata. Pools with [pool.scaling]: {known}"
            )
        found = self._scaling.scaled.get(name)
        if found is None:
            raise NotFound(
                f"there is no pool '{quoted_text(name)}' with [pool.scaling] in the cluster file. There are: {known}"
            )
        return found

    def _is_active(self, message: bytes) -> Message:
        return wire.IsActiveResponse(result=self.pool(message).wanted > 0)

    def _metric_spec(self, message: bytes) -> Message:
        self.pool(message)
        spec = wire.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return wire.GetMetricSpecResponse(metricSpecs=[spec])

    def _metrics(self, message: bytes) -> Message:
        wanted = self._of(wire.GetMetricsRequest.FromString(message).scaledObjectRef).wanted
        value = wire.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted))
        return wire.GetMetricsResponse(metricValues=[value])


def _error_of(error: NeriteError | DecodeError) -> NeriteError:
    return error if isinstance(error, NeriteError) else InvalidArgument("the message is not one of ExternalScaler")


class ScalerTarget(RefusedTarget):
    """Target of the calls with one answer."""

    def __init__(self, answer: Callable[[bytes], Message]) -> None:
        super().__init__(None)
        self.max_message = messages.MAX_QUESTION
        self._answer = answer

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Answer."""
        try:
            answer = self._answer(bytes(framed[_PREFIX_SIZE:]))
        except (NeriteError, DecodeError) as error:
            call.fail(messages.of_error(_error_of(error)))
            return
        call.reply(messages.HEAD, (messages.framed(answer.SerializeToString()),))


class ActivityFeed:
    """What the calls of ``StreamIsActive`` share."""

    max_message = messages.MAX_QUESTION

    def __init__(self, scaler: ExternalScaler, scaling: RouterScaling) -> None:
        self.scaler = scaler
        self.scaling = scaling


class ActivityTarget(RefusedTarget):
    """Target of the calls to ``StreamIsActive``."""

    def __init__(self, feed: ActivityFeed) -> None:
        super().__init__(None)
        self.stream = feed
        self.max_message = feed.max_message


class ActivityStream:
    """One call of ``StreamIsActive``: tells whether the pool should have members, and each change of that."""

    protocol = "GRPC"
    waits = True
    outer_span = None

    __slots__ = ("_active", "_feed", "_message", "_pool", "connection", "deadline", "share", "stream_id")

    def __init__(self, connection: GrpcConnection, stream_id: int, feed: ActivityFeed) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._feed = feed
        self._message = bytearray()
        self._pool: ScaledPool | None = None
        self._active: bool | None = None
        """What was told last."""
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the only message, and begin to tell once it is complete."""
        if self._pool is not None:
            return
        self._message += data
        size = int.from_bytes(self._message[1:_PREFIX_SIZE]) if len(self._message) >= _PREFIX_SIZE else 0
        if size > self._feed.max_message or len(self._message) > _PREFIX_SIZE + self._feed.max_message:
            self._end(messages.RESOURCE_EXHAUSTED, f"Received message larger than max ({self._feed.max_message})")
        elif len(self._message) == _PREFIX_SIZE + size:
            self._begin(bytes(self._message[_PREFIX_SIZE:]))
        elif end or len(self._message) > _PREFIX_SIZE + size > _PREFIX_SIZE:
            self._end(messages.INTERNAL, "the call does not carry exactly one message")

    def _begin(self, message: bytes) -> None:
        try:
            self._pool = self._feed.scaler.pool(message)
        except (NeriteError, DecodeError) as error:
            self.abandon(_error_of(error))
            return
        self.connection.http2.send_headers(self.stream_id, messages.HEAD)
        self._feed.scaling.observe(self._tell)
        self._tell(self._pool)

    def _tell(self, pool: ScaledPool) -> None:
        active = pool.wanted > 0
        if pool is self._pool and active is not self._active:
            self._active = active
            answer = wire.IsActiveResponse(result=active).SerializeToString()
            self.connection.http2.send_data(self.stream_id, [messages.framed(answer)])
            self.connection.answered()

    def _end(self, status: int, text: str) -> None:
        begun = self._pool is not None
        self._forget()
        if begun:
            self.connection.http2.send_trailers(self.stream_id, messages.trailers(status, text))
        else:
            self.connection.http2.send_headers(self.stream_id, messages.trailers_only(status, text), end_stream=True)
        self.connection.answered()

    def _forget(self) -> None:
        self._feed.scaling.forget(self._tell)
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.share.give_back()
        self.connection.calls.pop(self.stream_id, None)

    # For the connection

    def expect(self) -> None:
        """Reserve memory for the call."""
        if not self.share.take(_CALL_BYTES):
            self.abandon(self.connection.bounds.bytes.refusal(_CALL_BYTES))

    @property
    def arriving(self) -> int | None:
        """Bytes of a message that is incomplete."""
        return None if self._pool is not None else len(self._message)

    def stall(self, seconds: float) -> None:
        """End the call because its message made no progress."""
        self._end(messages.DEADLINE_EXCEEDED, messages.stalled_text(seconds))

    def block(self, blocked: bool) -> None:
        """Do nothing: a change is a few bytes."""

    def writable(self) -> None:
        """Do nothing: a change is a few bytes."""

    def shut_down(self) -> None:
        """End the call: the router stops, and KEDA asks another one."""
        self._end(messages.OK, "")

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: KEDA has given it up."""
        self._forget()

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        self.deadline = None
        self._end(messages.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self, error: NeriteError) -> None:
        """End the call with an error."""
        if self.connection.calls.get(self.stream_id) is self:
            self._end(error.grpc_status, error.message)
