"""Running an interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nerite.backends.arrays.instance import Compute
from nerite.backends.arrays.selection import Selection
from nerite.backends.litert.session import translated
from nerite.backends.litert.tensors import Tensors
from nerite.core.tensor import Array


def of_interpreter(interpreter: Any, tensors: Tensors) -> Compute:
    """Return the computation of an interpreter."""
    return _Main(interpreter, tensors) if tensors.runner is None else _Other(tensors.runner)


class _Main:
    """Runs the main graph. Its tensors are made anew only where a batch has other shapes than the one before."""

    def __init__(self, interpreter: Any, tensors: Tensors) -> None:
        self._interpreter = interpreter
        self._inputs = {name: int(tensor["index"]) for name, tensor in tensors.inputs.items()}
        self._outputs = {name: int(tensor["index"]) for name, tensor in tensors.outputs.items()}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        interpreter = self._interpreter
        try:
            shapes = {name: array.shape for name, array in inputs.items()}
            if shapes != self._shapes:
                self._shapes = {}
                for name, shape in shapes.items():
                    interpreter.resize_tensor_input(self._inputs[name], shape)
                interpreter.allocate_tensors()
                self._shapes = shapes
            for name, array in inputs.items():
                interpreter.set_tensor(self._inputs[name], array)
            # What a recurrent layer remembers is not for the next request.
            interpreter.reset_all_variables()
            interpreter.invoke()
            return [interpreter.get_tensor(self._outputs[name]) for name in selection.names]
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise translated(error) from error


class _Other:
    """Runs a signature whose graph is not the main one, for which there is this way alone."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            arrays = self._runner(**inputs)
        except Exception as error:  # As above.
            raise translated(error) from error
        return [arrays[name] for name in selection.names]
