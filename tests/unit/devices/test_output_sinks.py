"""Outputs that are copied to or from GPUs before the response is passed on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cuda_process import with_devices
from doubles import Caller, request
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import DeviceBuffer, TensorData, TensorSpec
from nerite.devices import cuda, exchange
from nerite.devices.devices import Devices
from nerite.devices.output_sinks import PooledOutputs, RegionOutputs

SIZE = 64
pytestmark = pytest.mark.usefixtures("cuda_process")


def on_gpu(value: int, size: int = SIZE) -> DeviceBuffer:
    """Return memory on GPU 0 whose bytes all are ``value``."""
    data = np.full(size, value, np.uint8)
    with exchange.stream_on(0) as stream:
        buffer = DeviceBuffer(0, cuda.allocate(size), size, None)
        stream.to_device(buffer.address, data.ctypes.data, size)
        stream.wait()
    return buffer


def response(*data: TensorData, datatype: dtypes.DataType = dtypes.UINT8) -> InferenceResponse:
    outputs = [TensorSpec(f"OUT{number}", datatype, (len(each),)) for number, each in enumerate(data)]
    return InferenceResponse(ResponseHeader("model", "1", outputs), data)


async def settled(devices: Devices) -> None:
    """Wait until what GPU 0 has been asked for is done, and was told."""
    await devices.thread(0).call(lambda _: None)


def test_an_output_goes_to_the_clients_memory_and_others_stay() -> None:
    async def test(devices: Devices) -> None:
        caller, place = Caller(), on_gpu(0)
        asked = request()
        sink = RegionOutputs(caller, devices, {"OUT0": place})
        sink.respond(asked, response(bytes([7]) * SIZE, b"other"), True)
        assert not caller.answers  # the copy is the thread's
        await settled(devices)
        ((_, answer, final),) = caller.answers
        assert final and answer.error is None
        assert list(answer.data) == [b"", b"other"]
        assert bytes(exchange.to_host(place)) == bytes([7]) * SIZE

    with_devices(test)


def test_responses_keep_their_order_though_only_some_are_copied() -> None:
    async def test(devices: Devices) -> None:
        caller, asked, go = Caller(), request(), threading.Event()
        sink = RegionOutputs(caller, devices, {"OUT0": on_gpu(0)})
        devices.thread(0).do(lambda _: go.wait(10), lambda *_: None)
        sink.respond(asked, response(bytes([1]) * SIZE), False)
        sink.respond(asked, InferenceResponse(ResponseHeader("model", "1", [])), False)  # nothing to copy
        sink.respond(asked, response(bytes([2]) * SIZE), True)
        assert not caller.answers
        go.set()
        await settled(devices)
        assert [final for _, _, final in caller.answers] == [False, False, True]
        assert [len(each.data) for _, each, _ in caller.answers] == [1, 0, 1]
        sink.respond(request(), InferenceResponse(ResponseHeader("model", "1", [])), True)
        assert len(caller.answers) == 4  # nothing is being copied, so it need not wait

    with_devices(test)


def test_an_output_that_is_too_long_is_an_error_and_is_not_written() -> None:
    async def test(devices: Devices) -> None:
        caller, place = Caller(), on_gpu(0)
        RegionOutputs(caller, devices, {"OUT0": place}).respond(request(), response(bytes([7]) * (SIZE + 1)), True)
        ((_, answer, final),) = caller.answers
        assert final and isinstance(answer.error, Internal)
        assert f"should be at least {SIZE + 1} bytes to hold the results" in answer.error.message
        await settled(devices)
        assert not any(exchange.to_host(place))

    with_devices(test)


def test_an_output_that_is_too_long_does_not_overtake_earlier_ones() -> None:
    async def test(devices: Devices) -> None:
        caller, asked = Caller(), request()
        sink = RegionOutputs(caller, devices, {"OUT0": on_gpu(0)})
        sink.respond(asked, response(bytes([7]) * SIZE), False)
        sink.respond(asked, response(bytes([7]) * (SIZE + 1)), False)
        await settled(devices)
        assert [(each.error is None, final) for _, each, final in caller.answers] == [(True, False), (False, True)]

    with_devices(test)


def test_a_copy_that_fails_is_the_requests_error() -> None:
    async def test(devices: Devices) -> None:
        caller = Caller()
        nowhere = DeviceBuffer(0, 0x1234, SIZE, None)
        RegionOutputs(caller, devices, {"OUT0": nowhere}).respond(request(), response(bytes([7]) * SIZE), False)
        await settled(devices)
        ((_, answer, final),) = caller.answers
        assert final and answer.error is not None and answer.header is None

    with_devices(test)


def test_a_sink_that_raises_ends_the_request() -> None:
    class Broken(Caller):
        def respond(self, *args: Any) -> None:
            super().respond(*args)
            if len(self.answers) == 1:
                raise RuntimeError("closed")

    async def test(devices: Devices) -> None:
        caller = Broken()
        sink = RegionOutputs(caller, devices, {"OUT0": on_gpu(0)})
        asked = request(sink=caller)
        sink.respond(asked, response(bytes(SIZE)), True)
        await settled(devices)
        assert len(caller.answers) == 2 and isinstance(caller.answers[1][1].error, Internal) and asked.finished

    with_devices(test)


def test_outputs_for_workers_go_to_the_pool_and_to_the_host_if_it_is_full() -> None:
    async def test(devices: Devices) -> None:
        caller = Caller()
        sink = PooledOutputs(caller, devices, 0)
        elsewhere = on_gpu(9)
        sink.respond(request(), response(elsewhere), True)  # opens the pool; this one goes to the host
        await settled(devices)
        assert bytes(caller.answers[0][1].buffers[0]) == bytes([9]) * SIZE
        pool = devices.pool(0)
        assert pool is not None
        sink.respond(request(), response(elsewhere, bytes([5]) * SIZE), True)
        await settled(devices)
        there = caller.answers[1][1].data
        assert all(isinstance(each, DeviceBuffer) and pool.offset_of(each) is not None for each in there)
        assert [exchange.on_host(each)[0] for each in there] == [9, 5]
        sink.respond(request(), response(there[0]), True)  # it is there already
        assert caller.answers[2][1].data[0] is there[0]
        sink.respond(request(), response(bytes(pool.size + 1)), True)  # no room
        assert caller.answers[3][1].data[0] == bytes(pool.size + 1)
        sink.respond(request(), response(b"\1\0\0\0a", datatype=dtypes.BYTES), True)  # strings are not for GPUs
        assert caller.answers[4][1].data[0] == b"\1\0\0\0a"

    with_devices(test, pool_bytes={0: 4096})
