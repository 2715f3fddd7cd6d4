"""KEDA's external scaler on the router's gRPC port, asked by a stock gRPC client made from the documented contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from h2_member import until

from nerite.autoscaling.policy import ScalingPolicy
from nerite.cluster.settings import MemberSource, PoolSettings, RouterSettings
from nerite.router.grpc_port import RouterGrpcPort
from nerite.router.http_members import HttpMembers
from nerite.router.pools import PoolTable, RouterPool
from nerite.router.scaling import RouterScaling, ScaledPool
from nerite.transports.limits import TransportLimits

# The messages as KEDA documents them, with their own names and numbers: ours must be the same on the wire.
_F = FieldDescriptorProto
_FIELDS = {
    "ScaledObjectRef": [("name", _F.TYPE_STRING), ("namespace", _F.TYPE_STRING), ("scalerMetadata", "MetadataEntry")],
    "MetadataEntry": [("key", _F.TYPE_STRING), ("value", _F.TYPE_STRING)],
    "IsActiveResponse": [("result", _F.TYPE_BOOL)],
    "GetMetricSpecResponse": [("metricSpecs", "MetricSpec")],
    "MetricSpec": [("metricName", _F.TYPE_STRING), ("targetSize", _F.TYPE_INT64), ("targetSizeFloat", _F.TYPE_DOUBLE)],
    "GetMetricsRequest": [("scaledObjectRef", "=ScaledObjectRef"), ("metricName", _F.TYPE_STRING)],
    "GetMetricsResponse": [("metricValues", "MetricValue")],
    "MetricValue": [
        ("metricName", _F.TYPE_STRING),
        ("metricValue", _F.TYPE_INT64),
        ("metricValueFloat", _F.TYPE_DOUBLE),
    ],
}


def documented() -> dict[str, Any]:
    """Return the classes of the documented messages. A map is a repeated message with key and value."""
    file = FileDescriptorProto(name="keda.proto", package="externalscaler", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = DescriptorProto(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            one = _F(name=field, number=number, label=_F.LABEL_OPTIONAL)
            if isinstance(kind, str):
                one.type = _F.TYPE_MESSAGE
                one.type_name = f".externalscaler.{kind.removeprefix('=')}"
                one.label = _F.LABEL_OPTIONAL if kind[0] == "=" else _F.LABEL_REPEATED
            else:
                one.type = kind
            message.field.append(one)
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}")) for name in _FIELDS}


KEDA = documented()


def reference(pool: str = "main", **metadata: str) -> Any:
    entries = {"scalerAddress": "router:8001", **({"pool": pool} if pool else {}), **metadata}
    return KEDA["ScaledObjectRef"](
        name="servers",
        namespace="default",
        scalerMetadata=[KEDA["MetadataEntry"](key=key, value=value) for key, value in entries.items()],
    )


class Scaler:
    """A router's gRPC port, and a channel to it."""

    def __init__(self, scaling: RouterScaling, port: RouterGrpcPort, channel: grpc.aio.Channel) -> None:
        self.scaling = scaling
        self.port = port
        self._channel = channel

    def _method(self, kind: str, name: str, answer: str) -> Any:
        return getattr(self._channel, kind)(
            f"/externalscaler.ExternalScaler/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=KEDA[answer].FromString,
        )

    async def is_active(self, asked: Any) -> bool:
        return bool((await self._method("unary_unary", "IsActive", "IsActiveResponse")(asked, timeout=10)).result)

    async def metric_spec(self, asked: Any) -> Any:
        return await self._method("unary_unary", "GetMetricSpec", "GetMetricSpecResponse")(asked, timeout=10)

    async def metrics(self, asked: Any, name: str) -> Any:
        request = KEDA["GetMetricsRequest"](scaledObjectRef=asked, metricName=name)
        return await self._method("unary_unary", "GetMetrics", "GetMetricsResponse")(request, timeout=10)

    def activity(self, asked: Any) -> Any:
        return self._method("unary_stream", "StreamIsActive", "IsActiveResponse")(asked, timeout=30)

    def pass_second(self, at: float) -> None:
        scaled = self.scaling.scaled["main"]
        if scaled.observe(1.0, at):
            self.scaling.tell(scaled)


def scaler(work: Callable[[Scaler], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        policy = ScalingPolicy(**{"least": 0, "most": 5, "idle": 10.0, "rate": 1.0, **settings})
        pools = [
            RouterPool(PoolSettings("main", MemberSource(), scaling=policy)),
            RouterPool(PoolSettings("other", MemberSource())),
        ]
        scaling = RouterScaling(pools)
        health = cast(HttpMembers, SimpleNamespace())
        port = RouterGrpcPort(PoolTable(pools), health, RouterSettings(), (), TransportLimits(), scaling)
        number = await port.open("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
                await work(Scaler(scaling, port, channel))
            await until(lambda: port.open_connections == 0)
        finally:
            port.stop_accepting()
            port.abort()

    asyncio.run(main())


def test_the_metric_is_the_number_of_members_and_its_target_is_one() -> None:
    async def work(keda: Scaler) -> None:
        asked = reference()
        (spec,) = (await keda.metric_spec(asked)).metricSpecs
        assert (spec.targetSize, spec.targetSizeFloat) == (1, 1.0)
        assert not await keda.is_active(asked)
        demand = keda.scaling.scaled["main"].pool.demand
        assert demand is not None
        demand.arrived = 2.0
        keda.pass_second(1.0)
        (value,) = (await keda.metrics(asked, spec.metricName)).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == (spec.metricName, 3, 3.0)
        assert await keda.is_active(asked)

    scaler(work)


def test_activity_is_pushed_when_it_changes() -> None:
    async def work(keda: Scaler) -> None:
        stream = keda.activity(reference())
        assert not (await stream.read()).result
        keda.scaling.scaled["main"].pool.held = 1
        keda.pass_second(1.0)
        assert (await stream.read()).result
        keda.scaling.scaled["main"].pool.held = 0
        for second in range(2, 14):
            keda.pass_second(float(second))
        assert not (await stream.read()).result
        stream.cancel()

    scaler(work)


def test_an_observer_that_raises_keeps_no_change_from_the_others() -> None:
    def broken() -> Callable[[ScaledPool], None]:
        def changed(scaled: ScaledPool) -> None:
            raise ZeroDivisionError

        return changed

    told: list[ScaledPool] = []
    pool = RouterPool(PoolSettings("p", MemberSource(), scaling=ScalingPolicy(concurrency=1.0)))
    scaling = RouterScaling([pool])
    for observer in (*(broken() for _ in range(8)), told.append):
        scaling.observe(observer)
    scaling.tell(scaling.scaled["p"])
    assert told == [scaling.scaled["p"]]


def test_a_stream_ends_when_the_router_stops() -> None:
    async def work(keda: Scaler) -> None:
        stream = keda.activity(reference())
        await stream.read()
        keda.port.stop_accepting()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK

    scaler(work)


async def failure(call: Callable[[], Awaitable[Any]]) -> tuple[grpc.StatusCode, str]:
    """Return how a call fails, and keep nothing of it: an error holds its channel open."""
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call has not failed")


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (reference(""), grpc.StatusCode.INVALID_ARGUMENT, "names no pool: add 'pool' to its metadata"),
        (reference("other"), grpc.StatusCode.NOT_FOUND, "There are: main"),
        (reference("x" * 2000), grpc.StatusCode.NOT_FOUND, "there is no pool"),
    ],
)
def test_a_wrong_trigger_is_told(asked: Any, code: grpc.StatusCode, words: str) -> None:
    async def work(keda: Scaler) -> None:
        calls = [lambda: keda.is_active(asked), lambda: keda.metric_spec(asked), lambda: keda.metrics(asked, "m")]
        for call in [*calls, lambda: keda.activity(asked).read()]:
            found, details = await failure(call)
            assert found is code
            assert words in details

    scaler(work)
