"""Sinks that copy the outputs of a request on GPUs before they pass the response on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import CallerSink
from nerite.core.request import InferenceRequest, ReplySink
from nerite.core.response import InferenceResponse
from nerite.core.tensor import ABSENT, DeviceBuffer, TensorData, TensorSpec, address_of
from nerite.devices.cuda import CudaStream
from nerite.devices.devices import Devices, DeviceThread

Copy = tuple[TensorData, TensorData]
"""Target and source of a copy, one of which is on a GPU."""


def copy_all(copies: Sequence[Copy], stream: CudaStream) -> None:
    """Make copies from or to GPUs, and wait for them. Raises ``NeriteError``."""
    for target, source in copies:
        size = len(source)
        if not size:
            continue
        if not isinstance(target, DeviceBuffer):
            assert isinstance(source, DeviceBuffer)
            stream.to_host(address_of(target), source.address, size)
        elif isinstance(source, DeviceBuffer):
            stream.on_device(target.address, source.address, size)
        else:
            stream.to_device(target.address, address_of(source), size)
    stream.wait()


class CopyingSink(CallerSink):
    """Copies the outputs of one request as ``_copies`` says, and passes the responses on in their order."""

    __slots__ = ("_pending", "_thread")

    def __init__(self, sink: ReplySink, thread: DeviceThread) -> None:
        """``thread`` makes the copies."""
        super().__init__(sink)
        self._thread = thread
        self._pending = 0
        """Responses whose outputs are being copied, and those behind them."""

    @abstractmethod
    def _place(self, spec: TensorSpec, data: TensorData) -> tuple[TensorData, Copy | None]:
        """Return what the response is to have in place of an output, and the copy to make. Raises ``NeriteError``."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Copy the outputs of a response, then pass it on; an error in its place if they cannot be copied."""
        copies: list[Copy] = []
        if response.header is not None:
            try:
                placed = [self._place(*each) for each in zip(response.header.outputs, response.data, strict=True)]
            except NeriteError as error:
                response, final = InferenceResponse.failed(error.without_frames()), True
            else:
                copies = [copy for _, copy in placed if copy is not None]
                response = InferenceResponse(response.header, [data for data, _ in placed])
        if not copies and not self._pending:
            self._sink.respond(request, response, final)
            return
        self._pending += 1

        def done(_: object, error: NeriteError | None) -> None:
            self._pending -= 1
            if error is None:
                self._pass_on(request, response, final)
            else:
                self._pass_on(request, InferenceResponse.failed(error), True)

        self._thread.do(lambda stream: copy_all(copies, stream), done)

    def _pass_on(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        try:
            self._sink.respond(request, response, final)
        except Exception as error:
            request.sink_failed(error, response)


class RegionOutputs(CopyingSink):
    """Writes outputs to GPU memory of a client."""

    __slots__ = ("_places",)

    def __init__(self, sink: ReplySink, devices: Devices, places: Mapping[str, DeviceBuffer]) -> None:
        """``places`` has the destinations by output; there is at least one."""
        super().__init__(sink, devices.thread(next(iter(places.values())).device))
        self._places = places

    def _place(self, spec: TensorSpec, data: TensorData) -> tuple[TensorData, Copy | None]:
        place = self._places.get(spec.name)
        if place is None:
            return data, None
        if len(data) > place.size:
            raise Internal(
                f"shared memory size specified with the request for output '{spec.name}' ({place.size} bytes) should "
                f"be at least {len(data)} bytes to hold the results"
            )
        return ABSENT, (place, data)


class PooledOutputs(CopyingSink):
    """Brings outputs to the server's pool on a GPU, where workers find them; if there is no room, to the host."""

    __slots__ = ("_device", "_devices")

    def __init__(self, sink: ReplySink, devices: Devices, device: int) -> None:
        """Raises ``NeriteError`` if there is no such GPU."""
        super().__init__(sink, devices.thread(device))
        self._devices = devices
        self._device = device

    def _place(self, spec: TensorSpec, data: TensorData) -> tuple[TensorData, Copy | None]:
        pool = self._devices.pool(self._device)
        if isinstance(data, DeviceBuffer) and pool is not None and pool.offset_of(data) is not None:
            return data, None
        if pool is None:  # the next ones will find it
            self._devices.with_pool(self._device, lambda _: None)
        target = None if pool is None or spec.datatype is dtypes.BYTES else pool.allocate(len(data))
        if target is not None:
            return target, (target, data)
        if not isinstance(data, DeviceBuffer):
            return data, None
        on_host = np.empty(data.size, np.uint8).data
        return on_host, (on_host, data)
