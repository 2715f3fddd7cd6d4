"""Reading what an ONNX model says about itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import Unsupported

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


def of_session(session: Any) -> Graph:
    """Read the graph of an open session. Raises ``Unsupported`` for a tensor that the protocol cannot carry."""
    return Graph(
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
        raise Unsupported(f"tensor '{name}' is a {onnx_type}, and the protocol has no data type for its elements")
    shown = _OTHER_KINDS.get(kind, "ONNX_TYPE_UNKNOWN")
    text = f"Unsupported ONNX Type '{shown}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'."
    if kind in ("seq", "map"):
        text += (
            " Export the model with tensors only; for a scikit-learn classifier that is "
            "convert_sklearn(..., options={'zipmap': False})."
        )
    raise Unsupported(text)
