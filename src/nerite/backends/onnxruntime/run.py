"""Runs sessions with ``OrtValue`` objects: where numpy lacks a type of the model, and on GPUs, with I/O binding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.device import DeviceInputs
from nerite.backends.arrays.graph import ModelGraph
from nerite.backends.configuration import TensorPort
from nerite.backends.onnxruntime.session import onnxruntime
from nerite.core import tensor as dtypes
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array, DeviceBuffer
from nerite.devices import cuda, exchange
from nerite.devices.dlpack import DeviceArray

Run: TypeAlias = Callable[[list[str], Mapping[str, Array], Any], Sequence[Array]]
"""Computes the named outputs, in that order, with ``RunOptions`` or None. Raises what ONNX Runtime raises."""

_ONNX_BFLOAT16: Final = 16


def check_bfloat16() -> None:
    """Raise ``Unsupported`` for a version of ONNX Runtime that takes no BF16 from Python: one before 1.20."""
    if not hasattr(onnxruntime().OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise Unsupported("this version of onnxruntime does not accept BF16 from Python: pip install -U onnxruntime")


def run_with_values(session: Any, graph: ModelGraph) -> Run:
    """Return the function that runs a session with BF16 among its types, on arrays."""
    values_of = onnxruntime().OrtValue
    narrow = {
        tensor.name
        for side in (graph.inputs, graph.defaulted)
        for tensor in side.values()
        if tensor.datatype is dtypes.BF16
    }

    def run(names: list[str], feeds: Mapping[str, Array], options: Any) -> Sequence[Array]:
        values = {
            name: values_of.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
            if name in narrow
            else values_of.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        return [_array(value) for value in session.run_with_ort_values(names, values, options)]

    return run


def _array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()  # type: ignore[no-any-return]  # The package has no types.
    shape = tuple(value.shape())
    size = prod(shape) * dtypes.BF16.size
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtypes.BF16.numpy).reshape(shape)


class DeviceSessionRun:
    """Computation of one instance on a GPU, whose inputs are numbers. Instances may share the session."""

    stream = None
    """ONNX Runtime uses streams of its own, and waits for them at the end of a run."""

    def __init__(self, session: Any, options: Any, device: int) -> None:
        """``options``: ``RunOptions`` or None. ``device`` is the number of the GPU that the session computes on."""
        self._session = session
        self._options = options
        self.device = device
        self._place = cuda.FRAMEWORK_DEVICE, device if cuda.FRAMEWORK_DEVICE == "cuda" else 0

    def launch(
        self, selection: OutputSelection, inputs: DeviceInputs, kept: Collection[str]
    ) -> Sequence[DeviceArray | Array]:
        """Compute the outputs of ``selection``. Raises what ONNX Runtime raises."""
        binding = self._session.io_binding()
        taken = set()
        for name, array in inputs.items():
            assert isinstance(array, DeviceArray), "no strings"
            element = _ONNX_BFLOAT16 if array.datatype is dtypes.BF16 else array.dtype
            binding.bind_input(name, *self._place, element, array.shape, array.buffer.address)
            taken.add(array.buffer.address)
        for port in selection.ports:
            binding.bind_output(port.name, *(("cpu", 0) if port.datatype is dtypes.BYTES else self._place))
        self._session.run_with_iobinding(binding, self._options)
        return [
            self._output(port, value, taken if port.name in kept else ())
            for port, value in zip(selection.ports, binding.get_outputs(), strict=True)
        ]

    def close(self) -> None:
        """Do nothing: the session is the model's."""

    def _output(self, port: TensorPort, value: Any, taken: Collection[int]) -> DeviceArray | Array:
        """Return an output where it is, which is on the GPU for numbers; a copy of one at an address in ``taken``."""
        if port.datatype is dtypes.BYTES or value.device_name() != self._place[0]:
            return _array(value)
        shape = tuple(value.shape())
        size = prod(shape) * port.datatype.size
        if value.data_ptr() in taken:
            copy = onnxruntime().OrtValue.ortvalue_from_shape_and_type((size,), np.uint8, *self._place)
            with exchange.stream_on(self.device) as stream:
                stream.on_device(copy.data_ptr(), value.data_ptr(), size)
                stream.wait()
            value = copy
        # The memory is of an allocator of the session.
        return DeviceArray(
            port.datatype, shape, DeviceBuffer(self.device, value.data_ptr(), size, (value, self._session))
        )
