"""The ONNX Runtime backend: completes configurations, opens models, creates and runs their instances."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.backends.arrays import graph
from nerite.backends.arrays.calls import OutputSelection, strings_as_text
from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.arrays.instance import ArrayInstance, Compute, of_graph
from nerite.backends.configuration import flag
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.onnxruntime import session
from nerite.backends.onnxruntime.session import OnnxSessionPlan, translated
from nerite.core import tensor as dtypes
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array, DataType

_DATATYPES: Final[dict[str, DataType]] = {
    "tensor(bool)": dtypes.BOOL,
    "tensor(uint8)": dtypes.UINT8,
    "tensor(uint16)": dtypes.UINT16,
    "tensor(uint32)": dtypes.UINT32,
    "tensor(uint64)": dtypes.UINT64,
    "tensor(int8)": dtypes.INT8,
    "tensor(int16)": dtypes.INT16,
    "tensor(int32)": dtypes.INT32,
    "tensor(int64)": dtypes.INT64,
    "tensor(float16)": dtypes.FP16,
    "tensor(float)": dtypes.FP32,
    "tensor(double)": dtypes.FP64,
    "tensor(string)": dtypes.BYTES,
    "tensor(bfloat16)": dtypes.BF16,
}

_OTHER_KINDS: Final[dict[str, str]] = {
    "seq": "ONNX_TYPE_SEQUENCE",
    "map": "ONNX_TYPE_MAP",
    "opaque": "ONNX_TYPE_OPAQUE",
    "sparse_tensor": "ONNX_TYPE_SPARSETENSOR",
}


def graph_of_session(session: Any) -> ModelGraph:
    """Read the graph of an open session. Raises ``Unsupported`` for a tensor type that the protocol does not have."""
    return ModelGraph(
        _tensors(session.get_inputs()),
        _tensors(session.get_outputs()),
        _tensors(session.get_overridable_initializers()),
    )


def _tensors(nodes: Iterable[Any]) -> dict[str, GraphTensor]:
    return {
        node.name: GraphTensor(node.name, _datatype(node.name, node.type), tuple(map(_size, node.shape)))
        for node in nodes
    }


def _size(dim: object) -> int:
    # A symbolic size is a string, an unknown one is None.
    return dim if isinstance(dim, int) and dim >= 0 else -1


def _datatype(name: str, onnx_type: str) -> DataType:
    found = _DATATYPES.get(onnx_type)
    if found is not None:
        return found
    kind = onnx_type.partition("(")[0]
    if kind == "tensor":
        raise Unsupported(f"tensor '{name}' is a {onnx_type}, but the protocol has no data type for its elements")
    shown = _OTHER_KINDS.get(kind, "ONNX_TYPE_UNKNOWN")
    text = f"Unsupported ONNX Type '{shown}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'."
    if kind in ("seq", "map"):
        text += (
            " Export the model with tensors only; for a scikit-learn classifier that is "
            "convert_sklearn(..., options={'zipmap': False})."
        )
    raise Unsupported(text)


# Running a session: with numpy arrays, or with ``OrtValue`` objects if numpy lacks a type of the model.
#
# Arrays are faster by 3 to 10 microseconds per run on a CPU; I/O binding is slower than both.

_Run: TypeAlias = Callable[[list[str], Mapping[str, Array], Any], Sequence[Array]]
"""Computes the named outputs, in that order, with ``RunOptions`` or None. Raises what ONNX Runtime raises."""

_ONNX_BFLOAT16: Final = 16


def runner_of_session(session: Any, graph: ModelGraph, run_options: Any) -> Compute:
    """Return a function that runs a session, as its graph requires, with these ``RunOptions`` or None."""
    run = _with_values(session, graph) if graph.uses_bfloat16 else _with_arrays(session)

    def compute(selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            return run(selection.names, inputs, run_options)
        except Exception as error:  # the framework may raise anything
            raise translated(error) from error

    return compute


def _with_arrays(session: Any) -> _Run:
    # The native method behind ``InferenceSession.run``, which adds 4 to 7 microseconds of checks in Python that are
    # redundant here. Attribute and arguments are as old as the wrapper; without them, its own ``run`` is used.
    return getattr(session, "_sess", session).run  # type: ignore[no-any-return]  # The package has no types.


def _with_values(session: Any, graph: ModelGraph) -> _Run:
    from onnxruntime import OrtValue

    if not hasattr(OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise Unsupported("this version of onnxruntime does not accept BF16 from Python: pip install -U onnxruntime")
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


class OnnxRuntimeBackend:
    """Backend for ONNX models on ONNX Runtime."""

    name = "onnxruntime"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        The session opened for this is kept in the context for ``open``. Raises ``NeriteError``.
        """
        if not graph.needs_completion(context):
            return context.config
        wanted = session.make_plan(context, session.first_instance(context))
        opened = context.memo[wanted] = session.open_session(wanted)
        return graph.complete_from_graph(context, graph_of_session(opened))

    def open(self, context: ModelContext) -> OnnxModel:
        """Open a model with a complete configuration. Raises ``NeriteError`` if model and configuration differ."""
        return OnnxModel(context)


class OnnxModel:
    """Open model: its sessions, and the state that its instances share.

    Instances on a CPU share one session: ONNX Runtime allows that, the throughput is the same as with one session each
    (see ``benchmarks/onnx_backend.py``), and the weights are in memory only once. Instances on accelerators get a
    session each, because some providers allow only one thread. ``share_session_between_instances`` overrides this.
    """

    def __init__(self, context: ModelContext) -> None:
        wanted = session.make_plan(context, session.first_instance(context))
        self._run_entries = session.run_entries(context, wanted)
        opened = context.memo.pop(wanted, None) or session.open_session(wanted)
        self._context = context
        self._plan = wanted
        self._graph = graph_of_session(opened)
        self._face = of_graph(context, self._graph, strings_as_text)
        key = "share_session_between_instances"
        self._share = flag(context, key, default=False) if context.parameter(key) else None
        self._lock = threading.Lock()
        self._spare: dict[OnnxSessionPlan, Any] = {wanted: opened}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Create an instance, with its own session or a shared one. Raises ``NeriteError``."""
        run_options = session.run_options(self._run_entries)
        return self._face.instance(runner_of_session(self._session(context), self._graph, run_options))

    def close(self) -> None:
        """Drop the sessions; each is freed with the last response that refers to one of its arrays."""
        self._spare.clear()

    def _session(self, context: InstanceContext) -> Any:
        # Not a new plan: the file may have changed meanwhile, and all instances must use the same model.
        wanted = session.instance_plan(self._plan, self._context, context)
        share = wanted.providers == (session.CPU,) if self._share is None else self._share
        with self._lock:
            if not share:
                return self._spare.pop(wanted, None) or session.open_session(wanted)
            if wanted not in self._spare:
                self._spare[wanted] = session.open_session(wanted)
            return self._spare[wanted]
