"""Outputs that clients want in their own memory on a GPU: copied there before the response is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import CallerSink
from nerite.core.request import InferenceRequest, ReplySink
from nerite.core.response import InferenceResponse
from nerite.core.tensor import DeviceBuffer, TensorData, address_of
from nerite.devices.cuda import CudaStream
from nerite.devices.devices import Devices

_WRITTEN: Final = b""
"""Stands for an output that the client has in its memory."""


class RegionOutputs(CallerSink):
    """Writes outputs of one request to GPU memory of its client; passes the responses on in their order."""

    __slots__ = ("_pending", "_places", "_thread")

    def __init__(self, sink: ReplySink, devices: Devices, places: Mapping[str, DeviceBuffer]) -> None:
        """``places`` has the destinations by output; there is at least one."""
        super().__init__(sink)
        self._places = places
        self._thread = devices.thread(next(iter(places.values())).device)
        self._pending = 0
        """Responses whose outputs are being copied, and those behind them."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Copy the outputs of a response, then pass it on; an error in its place if they cannot be copied."""
        copies: list[tuple[DeviceBuffer, TensorData]] = []
        if response.header is not None:
            rest: list[TensorData] = []
            for spec, data in zip(response.header.outputs, response.data, strict=True):
                place = self._places.get(spec.name)
                if place is not None and len(data) > place.size:
                    self._pass_on(request, InferenceResponse.failed(_too_small(spec.name, place.size, len(data))), True)
                    return
                if place is not None:
                    copies.append((place, data))
                rest.append(data if place is None else _WRITTEN)
            response = InferenceResponse(response.header, rest)
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

        self._thread.do(lambda stream: _copy(copies, stream), done)

    def _pass_on(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        try:
            self._sink.respond(request, response, final)
        except Exception as error:
            request.sink_failed(error, response)


def _copy(copies: list[tuple[DeviceBuffer, TensorData]], stream: CudaStream) -> None:
    for place, data in copies:
        if isinstance(data, DeviceBuffer):
            stream.on_device(place.address, data.address, data.size)
        elif data:
            stream.to_device(place.address, address_of(data), len(data))
    stream.wait()


def _too_small(name: str, size: int, needed: int) -> Internal:
    return Internal(
        f"shared memory size specified with the request for output '{name}' ({size} bytes) should be at least {needed} "
        "bytes to hold the results"
    )
