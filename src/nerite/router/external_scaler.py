"""KEDA's external scaler on the router's gRPC port: the number of members that a pool should have.

The metric is that number, and its target is 1, so that a HorizontalPodAutoscaler arrives at the number as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError, Message

from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.core.text import quoted_text
from nerite.router.grpc_service import RefusedTarget
from nerite.router.scaling import RouterScaling, ScaledPool
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall, GrpcConnection
from nerite.transports.grpc.subscription import Subscription
from nerite.wire import external_scaler as wire

SERVICE: Final = "/externalscaler.ExternalScaler/"
METRIC: Final = "nerite-members-wanted"
_KEY: Final = "pool"
_PREFIX_SIZE: Final = 5


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


class ActivityStream(Subscription):
    """One call of ``StreamIsActive``: tells whether the pool should have members, and each change of that."""

    __slots__ = ("_active", "_feed", "_pool")

    def __init__(self, connection: GrpcConnection, stream_id: int, feed: ActivityFeed) -> None:
        super().__init__(connection, stream_id)
        self._feed = feed
        self._pool: ScaledPool | None = None
        self._active: bool | None = None
        """What was told last."""

    def begin(self, message: bytes) -> None:
        """Tell whether the pool should have members, and each change from now on. Raises ``NeriteError``."""
        try:
            self._pool = self._feed.scaler.pool(message)
        except DecodeError as error:
            raise _error_of(error) from None
        self._feed.scaling.observe(self._tell)
        self._tell(self._pool)

    def _tell(self, pool: ScaledPool) -> None:
        active = pool.wanted > 0
        if pool is self._pool and active is not self._active:
            self.tell(wire.IsActiveResponse(result=active).SerializeToString())
            self._active = active

    def forget(self) -> None:
        """Observe the pools no more."""
        self._feed.scaling.forget(self._tell)
