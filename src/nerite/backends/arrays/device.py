"""Instances on a GPU: a batch is copied there while the one before it is computed, and outputs stay where they can.

A batch has three parts. ``begin`` copies its inputs on a stream of their own; inputs that are on the GPU already are
used where they are. The computation follows on another stream. What callers want on the host is then copied on a third
one. So the copies of one batch run beside the computation of the next and of the one before.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from nerite.backends.arrays import batches
from nerite.backends.arrays.calls import ArrayCall, Feed, OutputSelection
from nerite.backends.arrays.instance import ArrayInstance, ModelInterface
from nerite.backends.configuration import Shape
from nerite.backends.interface import ExecutionTimes
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, DataType, DeviceBuffer, TensorData, address_of, buffer_of
from nerite.devices import cuda
from nerite.devices.cuda import CudaEvent, CudaMemory, CudaStream
from nerite.devices.dlpack import DeviceArray
from nerite.devices.pools import PinnedPool

DeviceInputs: TypeAlias = Mapping[str, DeviceArray | Array]
"""Inputs by name: numbers on the GPU, strings on the host."""
Finish: TypeAlias = Callable[[], Sequence[InferenceResponse]]
"""Waits for a batch, and returns its responses. Raises what the computation raises. To be called once."""

_IN_FLIGHT: Final = 2
"""Batches of one instance that are on the GPU at a time: one computes, the next is copied."""
_ALIGNMENT: Final = 16
"""Kernels may read this many bytes at once, and fail at other addresses. What is elsewhere is copied."""


@runtime_checkable
class DeviceComputation(Protocol):
    """A computation that takes its inputs in the memory of a GPU, and leaves its outputs there."""

    @property
    def device(self) -> int:
        """The number of the GPU."""

    @property
    def stream(self) -> CudaStream | None:
        """What it computes with; None if ``launch`` returns only when the outputs are complete."""

    def launch(
        self, selection: OutputSelection, inputs: DeviceInputs, kept: Collection[str]
    ) -> Sequence[DeviceArray | Array]:
        """Start to compute the outputs of a selection, in its order; they are complete when the stream is.

        Without a stream the inputs are complete; with one, they are when what is on it already is done.
        The memory of inputs is used again: outputs among ``kept`` must not share it.
        """

    def close(self) -> None:
        """Release all resources. Called once."""


class _Slot:
    """Memory of the inputs of one batch on the GPU, and the events of its way. Used again by later batches."""

    def __init__(self) -> None:
        self.inputs: dict[str, CudaMemory] = {}
        self.staged: list[memoryview] = []
        """Pinned memory that inputs are copied from."""
        self.copied, self.computed, self.fetched = CudaEvent(), CudaEvent(), CudaEvent()

    def memory(self, name: str, size: int) -> int:
        """Return the address of room for an input."""
        memory = self.inputs.get(name)
        if memory is None:
            memory = self.inputs[name] = CudaMemory()
        memory.reserve(size)
        return memory.address

    def close(self) -> None:
        for memory in self.inputs.values():
            memory.free()
        for event in (self.copied, self.computed, self.fetched):
            event.close()


class DeviceArrayInstance(ArrayInstance):
    """Executes batches with a computation on a GPU. ``begin`` is for one thread, and what it returns for another."""

    def __init__(
        self,
        face: ModelInterface,
        compute: DeviceComputation,
        pinned_inputs: PinnedPool | None,
        pinned_outputs: PinnedPool | None,
    ) -> None:
        """The pools have memory of the process that copies need not wait for, if there is any."""
        super().__init__(face, compute)  # type: ignore[arg-type]  # never called: ``launch`` is
        self._computation: DeviceComputation | None = compute
        self._datatypes = face.datatypes
        self._device = compute.device
        self._pinned_inputs = pinned_inputs
        self._pinned_outputs = pinned_outputs
        cuda.use(self._device)
        self._copies_in, self._copies_out = CudaStream(), CudaStream()
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_IN_FLIGHT):
            self._slots.put(_Slot())

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer a batch. Raises ``NeriteError``."""
        return self.begin(requests, timings)()

    def begin(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Finish:
        """Start a batch. Waits while two others are not finished. Raises ``NeriteError``."""
        if not self._batching and len(requests) > 1:
            responses = [self.begin([request], timings)()[0] for request in requests]
            return lambda: responses
        cuda.use(self._device)
        calls = [self._calls.of(request.header) for request in requests]
        same = all(call is calls[0] for call in calls)
        selection = calls[0].selection if same else self._selections.union([call.selection for call in calls])
        kept = frozenset(
            name for name in selection.names if all(request.header.takes_on_device(name) for request in requests)
        )
        slot = self._slots.get()
        try:
            inputs = self._inputs(slot, requests, calls)
            self._copies_in.record(slot.copied)
            timings.inputs_ready()
            assert self._computation is not None, "closed"
            waits = self._computation.stream is None
            launched = None if waits else self._launched(slot, selection, inputs, kept)
        except BaseException:
            self._recover(slot)
            raise

        def finish() -> Sequence[InferenceResponse]:
            cuda.use(self._device)
            try:
                outputs = self._launched(slot, selection, inputs, kept) if launched is None else launched
                arrays = self._fetched(slot, selection, outputs, kept, timings)
            except BaseException:
                self._recover(slot)
                raise
            slot.staged.clear()
            self._slots.put(slot)
            return self._replies(selection, arrays, calls, same=same)

        return finish

    def close(self) -> None:
        """Release the computation, streams and memory."""
        computation, self._computation, self.compute = self._computation, None, None
        if computation is None:
            return
        cuda.use(self._device)
        computation.close()
        for _ in range(_IN_FLIGHT):
            self._slots.get().close()
        self._copies_in.close()
        self._copies_out.close()

    # Inputs

    def _inputs(
        self, slot: _Slot, requests: Sequence[InferenceRequest], calls: Sequence[ArrayCall]
    ) -> dict[str, DeviceArray | Array]:
        inputs: dict[str, DeviceArray | Array] = {}
        for feed in calls[0].feeds:
            positions = [call.positions[feed.name] for call in calls]
            parts = [request.data[position] for request, position in zip(requests, positions, strict=True)]
            shape = feed.shape
            if len(parts) > 1:  # otherwise it may be a scalar
                rows = sum([call.feeds[position].shape[0] for call, position in zip(calls, positions, strict=True)])
                shape = (rows, *shape[1:])
            inputs[feed.name] = self._input(slot, feed, shape, parts)
        for name, array in self._ragged.made([call.shapes for call in calls]).items():
            datatype = dtypes.from_numpy(array.dtype)
            assert datatype is not None, "a batch input has one of the protocol's types"
            inputs[name] = self._copied(slot, name, datatype, array.shape, [buffer_of(array, datatype)])
        return inputs

    def _input(self, slot: _Slot, feed: Feed, shape: Shape, parts: list[TensorData]) -> DeviceArray | Array:
        if feed.text is not None:
            host: list[Any] = parts
            return feed.text(shape, b"".join(host))
        datatype = self._datatypes[feed.name]
        only = parts[0]
        if len(parts) == 1 and isinstance(only, DeviceBuffer) and not only.address % _ALIGNMENT:
            return DeviceArray(datatype, shape, only)
        return self._copied(slot, feed.name, datatype, shape, parts)

    def _copied(
        self, slot: _Slot, name: str, datatype: DataType, shape: Shape, parts: Sequence[TensorData]
    ) -> DeviceArray:
        """Start to copy the parts of an input to the GPU, one behind the other."""
        size = prod(shape) * datatype.size
        at = start = slot.memory(name, size)
        stream, pinned = self._copies_in, self._pinned_inputs
        loose: list[Any] = []
        for part in parts:
            if not isinstance(part, DeviceBuffer) and (
                pinned is None or not part or not pinned.holds(address_of(part))
            ):
                loose.append(part)
                continue
            if loose:
                at += self._copy_loose(slot, at, loose)
                loose = []
            if isinstance(part, DeviceBuffer):
                stream.on_device(at, part.address, part.size)
            else:
                stream.to_device(at, address_of(part), len(part))
            at += len(part)
        if loose:
            self._copy_loose(slot, at, loose)
        return DeviceArray(datatype, shape, DeviceBuffer(self._device, start, size, slot))

    def _copy_loose(self, slot: _Slot, at: int, parts: list[Any]) -> int:
        """Copy bytes that are not in pinned memory: through it, if there is room. Return their number."""
        size = sum(map(len, parts))
        staged = None if self._pinned_inputs is None or not size else self._pinned_inputs.allocate(size)
        if staged is None:
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            if size:
                self._copies_in.to_device(at, address_of(whole), size)
            return size
        end = 0
        for part in parts:
            np.copyto(np.frombuffer(staged, np.uint8, len(part), end), np.frombuffer(part, np.uint8))
            end += len(part)
        slot.staged.append(staged)
        self._copies_in.to_device(at, address_of(staged), size)
        return size

    # The computation, and outputs

    def _launched(
        self, slot: _Slot, selection: OutputSelection, inputs: DeviceInputs, kept: Collection[str]
    ) -> Sequence[DeviceArray | Array]:
        """Compute the outputs, or start to: nothing of later batches may come before ``computed``."""
        assert self._computation is not None, "closed"
        stream = self._computation.stream
        try:
            if stream is None:
                slot.copied.wait()
                return self._computation.launch(selection, inputs, kept)
            stream.wait_for(slot.copied)
            outputs = self._computation.launch(selection, inputs, kept)
            stream.record(slot.computed)
            return outputs
        except NeriteError:
            raise
        except Exception as error:  # the framework may raise anything
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error

    def _fetched(
        self,
        slot: _Slot,
        selection: OutputSelection,
        outputs: Sequence[DeviceArray | Array],
        kept: Collection[str],
        timings: ExecutionTimes,
    ) -> list[DeviceArray | Array]:
        """Wait for the outputs; return those that are ``kept`` where they are, and the others on the host."""
        assert self._computation is not None, "closed"
        if self._computation.stream is None:
            timings.computed()
        else:
            self._copies_out.wait_for(slot.computed)
        arrays: list[DeviceArray | Array] = []
        for name, output in zip(selection.names, outputs, strict=True):
            arrays.append(output if isinstance(output, np.ndarray) or name in kept else self._on_host(output))
        self._copies_out.record(slot.fetched)
        try:
            if self._computation.stream is not None:
                slot.computed.wait()
                timings.computed()
            slot.fetched.wait()
        except NeriteError as error:
            raise self._failure(error) from None
        return arrays

    def _on_host(self, output: DeviceArray) -> Array:
        """Start to copy an output to the host; return the array that it will be in."""
        size = output.buffer.size
        memory = None if self._pinned_outputs is None or not size else self._pinned_outputs.allocate(size)
        array = np.ndarray(output.shape, output.datatype.numpy, np.empty(size, np.uint8) if memory is None else memory)
        if size:
            self._copies_out.to_host(array.ctypes.data, output.buffer.address, size)
        return array

    def _replies(
        self,
        selection: OutputSelection,
        arrays: Sequence[DeviceArray | Array],
        calls: Sequence[ArrayCall],
        *,
        same: bool,
    ) -> Sequence[InferenceResponse]:
        if self._ragged or not same or (len(calls) > 1 and self._selections.text):
            return batches.replies_to_all(selection, arrays, calls, self._ragged.sources)
        if len(calls) == 1:
            return [batches.reply_to_one(selection, arrays)]
        return batches.replies_to_equals(calls[0], arrays, len(calls))

    def _recover(self, slot: _Slot) -> None:
        """Make a slot usable after a failure: nothing may still read or write its memory."""
        computing = None if self._computation is None else self._computation.stream
        for stream in (self._copies_in, computing, self._copies_out):
            try:
                if stream is not None:
                    stream.wait()
            except NeriteError:  # reported already, or reported by the next use of the GPU
                continue
        slot.staged.clear()
        self._slots.put(slot)
