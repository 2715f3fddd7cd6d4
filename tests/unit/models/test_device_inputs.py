"""Inputs on GPUs: where they stay, where they are copied to, and what becomes of the request meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_process import with_devices
from doubles import Caller
from nerite.config.model_config import ModelConfig, ModelInstanceGroup, ModelParameter, ModelSequenceBatching
from nerite.core import tensor as dtypes
from nerite.core.errors import Cancelled, Internal, InvalidArgument, Unavailable
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.signature import Signature
from nerite.core.tensor import DeviceBuffer, TensorData, TensorSpec
from nerite.devices import cuda, exchange
from nerite.devices.devices import Devices
from nerite.models.device_inputs import DeviceInputStage, DevicePlacement, device_placement
from nerite.observability.statistics import VersionStatistics

pytestmark = pytest.mark.usefixtures("cuda_process")
ROWS = 16
ON_0 = DevicePlacement(0, pooled=False)


class Following:
    """The stage that requests come to: keeps them, or raises."""

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []
        self.error: Exception | None = None
        self.drained = 0
        self.pending = self.in_flight = 0

    def submit(self, request: InferenceRequest) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append(request)

    def when_drained(self, call: Callable[[], None]) -> None:
        self.drained += 1
        call()

    def abandon(self, error: Exception) -> None:
        """Have nothing to answer."""


class Case:
    """A stage in front of a model with a tensor of numbers and one of strings."""

    def __init__(self, devices: Devices, placement: DevicePlacement | None, room: Any = lambda size: None) -> None:
        self.devices = devices
        self.following: Any = Following()
        self.caller = Caller()
        self.stage = DeviceInputStage(
            self.following, devices, lambda: placement, room, Signature("m", 0, [], []), VersionStatistics()
        )

    def submit(self, *data: TensorData, datatype: dtypes.DataType = dtypes.UINT8) -> InferenceRequest:
        specs = [TensorSpec(f"IN{number}", datatype, (ROWS,)) for number in range(len(data))]
        asked = InferenceRequest(RequestHeader("m", "", specs), data, self.caller, 0)
        self.stage.submit(asked)
        return asked

    async def settled(self) -> None:
        for number in (0, 1):
            await self.devices.thread(number).call(lambda _: None)

    def only(self) -> InferenceRequest:
        (request,) = self.following.requests
        return request

    def error(self) -> Any:
        ((_, answer, final),) = self.caller.answers
        assert final
        return answer.error


def on_gpu(data: bytes, device: int = 0) -> DeviceBuffer:
    with exchange.stream_on(device) as stream:
        buffer = DeviceBuffer(device, cuda.allocate(len(data)), len(data), None)
        stream.to_device(buffer.address, np.frombuffer(data, np.uint8).ctypes.data, len(data))
        stream.wait()
    return buffer


NUMBERS = bytes(range(ROWS))


def test_what_is_where_the_model_takes_it_is_passed_on_at_once() -> None:
    async def test(devices: Devices) -> None:
        for placement, data in ((ON_0, on_gpu(NUMBERS)), (None, NUMBERS)):
            case = Case(devices, placement)
            asked = case.submit(data)
            assert case.only() is asked and asked.data[0] is data

    with_devices(test)


@pytest.mark.parametrize(("placement", "device"), [(None, 0), (ON_0, 1), (DevicePlacement(1, pooled=True), 0)])
def test_what_is_elsewhere_is_copied_to_the_host(placement: DevicePlacement | None, device: int) -> None:
    async def test(devices: Devices) -> None:
        given: list[memoryview] = []

        def room(size: int) -> memoryview:
            given.append(memoryview(bytearray(size)))
            return given[-1]

        case = Case(devices, placement, room)
        asked = case.submit(on_gpu(NUMBERS, device), b"x" * ROWS)
        assert not case.following.requests and case.stage.pending == case.stage.in_flight == 1
        await case.settled()
        assert case.only() is asked and case.stage.pending == 0 and asked.on_cancel is None
        assert asked.data[0] is given[0] and bytes(given[0]) == NUMBERS and asked.data[1] == b"x" * ROWS

    with_devices(test)


def test_a_model_in_workers_gets_it_in_the_pool_from_when_that_is_open() -> None:
    async def test(devices: Devices) -> None:
        case = Case(devices, DevicePlacement(0, pooled=True))
        for _ in range(2):
            case.submit(on_gpu(NUMBERS))
            await case.settled()
        first, second = case.following.requests
        pool = devices.pool(0)
        assert bytes(first.data[0]) == NUMBERS and pool is not None
        assert pool.offset_of(second.data[0]) is not None and bytes(exchange.to_host(second.data[0])) == NUMBERS
        case.submit(second.data[0])  # it is there already
        assert len(case.following.requests) == 3

    with_devices(test, pool_bytes={0: 4096})


@pytest.mark.parametrize("wire", [b"\4\0\0\0four" * ROWS, b"\4\0\0\0four" * (ROWS - 1), b"\xff\0\0\0four"])
def test_strings_come_to_the_host_and_are_checked_there(wire: bytes) -> None:
    async def test(devices: Devices) -> None:
        case = Case(devices, ON_0)
        asked = case.submit(on_gpu(wire), datatype=dtypes.BYTES)
        await case.settled()
        if len(wire) == 8 * ROWS:
            assert bytes(case.only().data[0]) == wire
        else:
            assert isinstance(case.error(), InvalidArgument) and not case.following.requests and asked.finished

    with_devices(test)


def test_a_cancelled_request_is_answered_while_its_inputs_are_copied() -> None:
    async def test(devices: Devices) -> None:
        case, go = Case(devices, None), threading.Event()
        devices.thread(0).do(lambda _: go.wait(10), lambda *_: None)
        asked = case.submit(on_gpu(NUMBERS))
        drained: list[int] = []
        case.stage.when_drained(lambda: drained.append(1))
        assert not drained
        asked.cancel()
        assert isinstance(case.error(), Cancelled) and case.stage.in_flight == 0 and drained == [1]
        go.set()
        await case.settled()
        assert not case.following.requests and len(case.caller.answers) == 1

    with_devices(test)


def test_a_model_that_is_unloaded_waits_for_what_is_copied_or_refuses_it() -> None:
    async def test(devices: Devices) -> None:
        case, go = Case(devices, None), threading.Event()
        devices.thread(0).do(lambda _: go.wait(10), lambda *_: None)
        case.submit(on_gpu(NUMBERS))
        case.stage.abandon(Unavailable("the model is being unloaded"))
        assert isinstance(case.error(), Unavailable) and case.stage.in_flight == 0
        go.set()
        await case.settled()
        case.submit(on_gpu(NUMBERS))
        drained: list[int] = []
        case.stage.when_drained(lambda: drained.append(1))
        await case.settled()
        assert drained == [1] and len(case.following.requests) == 1

    with_devices(test)


def test_a_copy_that_fails_is_the_requests_error() -> None:
    async def test(devices: Devices) -> None:
        case = Case(devices, None)
        case.submit(DeviceBuffer(0, 0x1234, ROWS, None))
        await case.settled()
        assert isinstance(case.error(), Internal | InvalidArgument) and case.stage.in_flight == 0

    with_devices(test)


def test_a_following_stage_that_raises_ends_the_request() -> None:
    async def test(devices: Devices) -> None:
        case = Case(devices, None)
        case.following.error = RuntimeError("a fault")
        case.submit(on_gpu(NUMBERS))
        await case.settled()
        assert isinstance(case.error(), Internal) and case.stage.in_flight == 0

    with_devices(test)


def test_memory_on_a_gpu_that_is_not_the_servers_is_refused_and_not_held() -> None:
    async def test(devices: Devices) -> None:
        case = Case(devices, None)
        with pytest.raises(InvalidArgument, match="there is no GPU 5"):
            case.submit(DeviceBuffer(5, 0x1234, ROWS, None))
        assert case.stage.in_flight == 0

    with_devices(test)


def config(backend: str = "pytorch", *, gpus: tuple[int, ...] = (1,), force: str = "", **more: Any) -> ModelConfig:
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": ModelParameter(string_value=force)} if force else {}
    group = ModelInstanceGroup(kind="KIND_GPU" if gpus else "KIND_CPU", gpus=list(gpus))
    return ModelConfig(name="m", backend=backend, instance_group=[group], parameters=parameters, **more)


@pytest.mark.parametrize(
    ("model", "device"),
    [
        (config(), 1),
        (config("python", force="no"), 1),
        (config("python", force="yes"), None),
        (config("python"), None),
        (config("tensorflow"), None),
        (config(gpus=()), None),
        (config(gpus=(0, 1)), None),
        (config(sequence_batching=ModelSequenceBatching()), None),
    ],
)
def test_which_models_take_tensors_on_a_gpu(model: ModelConfig, device: int | None) -> None:
    placement = device_placement(model, isolated=True)
    assert placement == (None if device is None else (device, True))


def test_a_wrong_value_names_the_model_and_the_parameter() -> None:
    with pytest.raises(InvalidArgument, match=r"FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe' .* model 'm'"):
        device_placement(config("python", force="maybe"), isolated=True)
