"""Computing: one infer request of OpenVINO, which belongs to one instance.

Inputs are read where they lie, also where that is memory that may not be written to. Outputs are copied, once: the next
computation reuses their memory. Having OpenVINO write to fresh memory instead was no faster at any size, and slower
for small ones by 10 microseconds: fresh memory costs as much as the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nerite.backends.arrays.selection import Selection
from nerite.backends.openvino import framework, strings
from nerite.core.tensor import Array


class Inference:
    """Computes what a selection wants, for one thread at a time: the ``Compute`` of an ``ArrayInstance``."""

    def __init__(self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str], rows: int = 0) -> None:
        """``inputs`` and ``outputs`` are the names, in the model's order; ``rows``: fill batches up to so many."""
        ov = framework.openvino()
        self._tensor = ov.Tensor
        self._request = compiled.create_infer_request()
        self._inputs = {name: (index, compiled.inputs[index].element_type) for index, name in enumerate(inputs)}
        self._outputs = {name: index for index, name in enumerate(outputs)}
        self._string = ov.Type.string
        self._text = any(port.element_type == self._string for port in compiled.outputs)
        self._rows = rows
        self._stateful = bool(self._request.query_state())

    def __call__(self, selection: Selection, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Return new arrays. Raises ``Internal`` with what OpenVINO says went wrong."""
        rows = len(next(iter(arrays.values()))) if self._rows else 0
        if rows < self._rows:
            arrays = {name: self._filled_up(array) for name, array in arrays.items()}
        try:
            if self._stateful:
                # What one request leaves must not change the answer to the next, which may be anybody's.
                self._request.reset_state()
            # Kept until all is computed: the request does not keep what it reads alive.
            fed = [self._fed(name, array) for name, array in arrays.items()]
            for index, tensor in fed:
                self._request.set_input_tensor(index, tensor)
            found = self._computed()
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise framework.translated(error, "running inference") from error
        wanted = [found[self._outputs[name]] for name in selection.names]
        if rows < self._rows:
            wanted = [array[:rows] if len(array) == self._rows else array for array in wanted]
        return [array if array.dtype.kind == "O" else array.copy() for array in wanted]

    def _fed(self, name: str, array: Array) -> tuple[int, Any]:
        """Return the place of an input and a tensor for it, on the memory of ``array`` where that will do."""
        index, element = self._inputs[name]
        if element == self._string:
            return index, self._tensor(array)
        shape = array.shape
        if not array.size:
            return index, self._tensor(element, shape)
        if not array.flags.aligned:
            array = array.copy()
        # OpenVINO looks at the first element, which before 2026 had to have an index.
        return index, self._tensor(array if shape else array.reshape(1), shape, element)

    def _computed(self) -> Sequence[Array]:
        """Return all outputs: numbers in memory that the next computation overwrites."""
        request = self._request
        if not self._text:
            return list(request.infer(share_outputs=True, decode_strings=False).values())
        request.start_async()
        request.wait()
        tensors = request.output_tensors
        return [
            strings.as_objects(tensor) if tensor.element_type == self._string else tensor.data for tensor in tensors
        ]

    def _filled_up(self, array: Array) -> Array:
        full = np.zeros((self._rows, *array.shape[1:]), array.dtype)
        full[: len(array)] = array
        return full
