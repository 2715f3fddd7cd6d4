"""The two ways to run a session: with arrays, and with values where numpy lacks a type of the model.

Arrays are the faster way by 3 to 10 microseconds a run, on a CPU; I/O binding is slower than both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.backends.arrays.graph import Graph
from nerite.backends.arrays.instance import Compute
from nerite.backends.arrays.selection import Selection
from nerite.backends.onnxruntime.session import translated
from nerite.core import dtype as dtypes
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array

_Run: TypeAlias = Callable[[list[str], Mapping[str, Array], Any], Sequence[Array]]
"""Computes the named outputs, in that order, with ``RunOptions`` or None. Raises what ONNX Runtime raises."""

_ONNX_BFLOAT16: Final = 16


def of_session(session: Any, graph: Graph, run_options: Any) -> Compute:
    """Return the way to run a session that suits its graph, with these ``RunOptions`` or None."""
    run = _with_values(session, graph) if graph.uses_bfloat16 else _with_arrays(session)

    def compute(selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            return run(selection.names, inputs, run_options)
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise translated(error) from error

    return compute


def _with_arrays(session: Any) -> _Run:
    # The method under ``InferenceSession.run``, which adds 4 to 7 microseconds of checks in Python of what is known to
    # be right here. The attribute and the arguments are as old as the wrapper; without them its own ``run`` will do.
    return getattr(session, "_sess", session).run  # type: ignore[no-any-return]  # The package has no types.


def _with_values(session: Any, graph: Graph) -> _Run:
    from onnxruntime import OrtValue

    if not hasattr(OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise Unsupported("this version of onnxruntime cannot be fed BF16 from Python: pip install -U onnxruntime")
    narrow = {
        tensor.name
        for side in (graph.inputs, graph.defaulted)
        for tensor in side.values()
        if tensor.datatype is dtypes.BF16
    }

    def run(names: list[str], feeds: Mapping[str, Array], options: Any) -> Sequence[Array]:
        values = {
            name: OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
            if name in narrow
            else OrtValue.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        return [_array(value) for value in session.run_with_ort_values(names, values, options)]

    return run


def _array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()  # type: ignore[no-any-return]  # The package has no types.
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=int)) * dtypes.BF16.size
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtypes.BF16.numpy).reshape(shape)
