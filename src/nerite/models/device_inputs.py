"""Inputs in GPU memory: passed on as they are where a model takes them, and brought to it where it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import numpy as np

from nerite.backends.registry import DEVICE_BACKENDS
from nerite.config.model_config import ModelConfig
from nerite.core import tensor as dtypes
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.failures import report
from nerite.core.queue_stage import FrontStage, QueueStage
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import DeviceBuffer, TensorData, TensorSpec
from nerite.devices.devices import Devices
from nerite.devices.output_sinks import Copy, copy_all
from nerite.observability.statistics import RequestOutcome, VersionStatistics

FORCE_CPU: Final = "FORCE_CPU_ONLY_INPUT_TENSORS"
"""Parameter of Python models: with the value ``no``, inputs may be on a GPU."""


class DevicePlacement(NamedTuple):
    """Where a model takes tensors that are on a GPU."""

    device: int
    pooled: bool
    """In the server's pool there only, as its instances run in other processes."""


def device_placement(config: ModelConfig, *, isolated: bool) -> DevicePlacement | None:
    """Return where a model takes tensors on a GPU; None if it takes them on the host. ``isolated``: in workers.

    Raises ``InvalidArgument`` for a parameter with a wrong value.
    """
    on_host = _on_host_only(config)
    gpus = {gpu for group in config.instance_group for gpu in group.gpus}
    kinds = {group.kind for group in config.instance_group}
    if on_host or kinds != {"KIND_GPU"} or len(gpus) != 1 or config.sequence_batching is not None:
        return None
    return DevicePlacement(gpus.pop(), isolated)


def _on_host_only(config: ModelConfig) -> bool:
    if config.backend == "onnxruntime" and any(each.data_type == "TYPE_STRING" for each in config.input):
        return True  # its I/O binding takes no strings
    if config.backend != "python":
        return config.backend not in DEVICE_BACKENDS
    parameter = config.parameters.get(FORCE_CPU)
    value = "yes" if parameter is None else parameter.string_value
    if value not in ("yes", "no"):
        raise InvalidArgument(
            f"Incorrect value for {FORCE_CPU}: '{value}' in the configuration of model '{config.name}'. It must be "
            "'yes' or 'no'"
        )
    return value == "yes"


class DeviceInputStage(FrontStage):
    """Stage that holds requests while inputs on a GPU are brought to where the model takes them."""

    def __init__(
        self,
        following: QueueStage,
        devices: Devices,
        placement: Callable[[], DevicePlacement | None],
        room: Callable[[int], memoryview | None],
        signature: Signature,
        statistics: VersionStatistics,
    ) -> None:
        """``room`` returns memory on the host that the instances can read without another copy."""
        super().__init__(following)
        self._devices = devices
        self._placement = placement
        self._room = room
        self._signature = signature
        self._statistics = statistics
        self._held: set[InferenceRequest] = set()

    @property
    def held(self) -> Collection[InferenceRequest]:
        """Requests whose inputs are being copied."""
        return self._held

    def submit(self, request: InferenceRequest) -> None:
        """Pass a request on, now or when its inputs are where the model takes them."""
        if not request.on_device:
            self._following.submit(request)
            return
        placement = self._placement()
        data: list[TensorData] = list(request.data)
        moves: list[Copy] = []
        for index, (spec, each) in enumerate(zip(request.header.inputs, request.data, strict=True)):
            if isinstance(each, DeviceBuffer) and not self._stays(spec, each, placement):
                data[index] = self._target(spec, each, placement)
                moves.append((data[index], each))
        if not moves:
            self._following.submit(request)
            return
        device = next(each.device for each in request.data if isinstance(each, DeviceBuffer))
        thread = self._devices.thread(device)
        self._held.add(request)
        request.on_cancel = self._cancelled

        def done(_: object, error: NeriteError | None) -> None:
            if request in self._held:
                self._held.discard(request)
                self._moved(request, data, error)
                self._check_drained()

        thread.do(lambda stream: copy_all(moves, stream), done)

    def _stays(self, spec: TensorSpec, buffer: DeviceBuffer, placement: DevicePlacement | None) -> bool:
        """Return whether the model takes an input where it is."""
        if placement is None or buffer.device != placement.device or spec.datatype is dtypes.BYTES:
            return False
        if not placement.pooled:
            return True
        pool = self._devices.pool(placement.device)
        return pool is not None and pool.offset_of(buffer) is not None

    def _target(self, spec: TensorSpec, buffer: DeviceBuffer, placement: DevicePlacement | None) -> TensorData:
        """Return the memory that an input is copied to: in the pool of the model's GPU, or on the host."""
        if placement is not None and buffer.device == placement.device and spec.datatype is not dtypes.BYTES:
            pool = self._devices.pool(placement.device)
            if pool is None:  # the next ones will find it
                self._devices.with_pool(placement.device, _ignored)
            elif (target := pool.allocate(buffer.size)) is not None:
                return target
        return self._room(buffer.size) or np.empty(buffer.size, np.uint8).data

    def _moved(self, request: InferenceRequest, data: list[TensorData], error: NeriteError | None) -> None:
        """Pass a request on whose inputs were copied to ``data``, or refuse it."""
        request.on_cancel = None
        if error is None:
            request.data = data
            error = self._signature.check_data(request)  # strings can be checked now
        if error is None:
            try:
                self._following.submit(request)
                return
            except Exception as unforeseen:
                failure = report("admission", unforeseen, f"of a request to '{request.header.model_name}'", request.id)
                request.respond(InferenceResponse.failed(failure))
                return
        self._statistics.failed(RequestOutcome.OTHER, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))

    def _cancelled(self, request: InferenceRequest) -> None:
        self._refuse(request, Cancelled(""), RequestOutcome.CANCELED)
        self._check_drained()

    def _refuse_held(self, error: NeriteError) -> None:
        for request in tuple(self._held):
            self._refuse(request, error, RequestOutcome.OTHER)

    def _refuse(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        self._held.discard(request)
        self._statistics.failed(outcome, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))


def _ignored(_pool: object) -> None:
    """Do nothing: the pool is open now."""
