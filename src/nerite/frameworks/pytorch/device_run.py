"""Computes with a program on a GPU: inputs and outputs are tensors in its memory, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.device import DeviceInputs
from nerite.backends.configuration import TensorPort
from nerite.core.tensor import Array, DeviceBuffer
from nerite.devices import cuda
from nerite.devices.cuda import CudaStream
from nerite.devices.dlpack import DeviceArray
from nerite.frameworks.pytorch.artifact import Binding, TorchPlan
from nerite.frameworks.pytorch.program import Program
from nerite.frameworks.pytorch.run import (
    ProgramRun,
    at_path,
    check_type,
    is_declared_scalar,
    is_shared,
    strings,
    to_array,
)


class DeviceProgramRun(ProgramRun):
    """Computation of one instance on a GPU. For one thread at a time."""

    def __init__(
        self, model: str, program: Program, binding: Binding, plan: TorchPlan, threads: int, device: int
    ) -> None:
        """``device`` is the number of the GPU that the program is on."""
        super().__init__(model, program, binding, plan, threads)
        self.device = device
        cuda.use(device)
        self.stream = CudaStream()
        self._torch_device = torch.device(program.device)

    def launch(
        self, selection: OutputSelection, inputs: DeviceInputs, kept: Collection[str]
    ) -> Sequence[DeviceArray | Array]:
        """Start to compute the outputs of ``selection``. Raises what PyTorch and the model's code raise."""
        bound = self._bound_to(inputs)
        self._set_up()
        with self._on_stream(), self._mode():
            values = [self._value(inputs[name]) for name, _ in bound.converters]
            result = bound.call(values)
            paths = self._paths or self._find_paths(result)
            return [
                self._output(port, at_path(result, paths[port.name]), values, kept=port.name in kept)
                for port in selection.ports
            ]

    def close(self) -> None:
        """Destroy the stream."""
        cuda.use(self.device)
        self.stream.close()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._torch_device.type == "cpu":  # where frameworks compute on the host, they see what has been copied
            self.stream.wait()
            yield
            return
        torch.backends.cudnn.enabled = self._plan.cudnn
        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.address, self._torch_device)):
            yield
        if self._plan.clean_cache:
            torch.cuda.empty_cache()

    def _value(self, given: DeviceArray | Array) -> Any:
        if not isinstance(given, DeviceArray):
            return strings(given)
        tensor = torch.from_dlpack(given)
        # Inputs that are used where they are belong to others.
        return tensor.clone() if self.program.writes_inputs else tensor

    def _output(self, port: TensorPort, value: Any, inputs: Sequence[Any], *, kept: bool) -> DeviceArray | Array:
        """Return an output where it is, which is usually on the GPU."""
        if not isinstance(value, torch.Tensor) or value.device != self._torch_device:
            return to_array(port, value, inputs, copied=True)
        check_type(port, value.dtype)
        tensor = value.detach().contiguous()
        # What the program, or the next batch, writes to again.
        if self.program.keeps_state or (kept and is_shared(tensor, inputs)):
            tensor = tensor.clone()
        shape = (1,) if is_declared_scalar(port, tensor.ndim) else tuple(tensor.shape)
        return DeviceArray(port.datatype, shape, DeviceBuffer(self.device, tensor.data_ptr(), tensor.nbytes, tensor))
