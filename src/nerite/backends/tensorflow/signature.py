"""What a model takes and gives: under the names that callers use, and as tensors of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.backends.configuration import batching, model_dims
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import InvalidArgument, Unsupported

_DATATYPES: Final[dict[str, DataType]] = {
    "float32": dtypes.FP32,
    "float64": dtypes.FP64,
    "int32": dtypes.INT32,
    "uint8": dtypes.UINT8,
    "int16": dtypes.INT16,
    "int8": dtypes.INT8,
    "string": dtypes.BYTES,
    "int64": dtypes.INT64,
    "bool": dtypes.BOOL,
    "bfloat16": dtypes.BF16,
    "uint16": dtypes.UINT16,
    "float16": dtypes.FP16,
    "uint32": dtypes.UINT32,
    "uint64": dtypes.UINT64,
}
"""By TensorFlow's name."""


class Signature(NamedTuple):
    """The tensors of a model, and what they are called in its graph (``name:0``)."""

    graph: Graph
    feeds: Mapping[str, str]
    fetches: Mapping[str, str]


class Described(NamedTuple):
    """A tensor as a model describes it. ``dims`` is None where not even their number is said."""

    name: str
    datatype: str
    dims: tuple[int, ...] | None


def tensors(
    model: str, described: Mapping[str, Described], config: Mapping[str, Any], side: str
) -> dict[str, GraphTensor]:
    """Return one side of a model, ``input`` or ``output``, as a graph has it.

    Where the model does not say the number of dimensions, they are those that ``config`` declares. Raises
    ``NeriteError`` where neither does, and for types that the protocol does not have.
    """
    declared = {entry["name"]: entry for entry in config.get(side, ())}
    batch = (-1,) if batching(config) else ()
    found = {}
    for name, tensor in described.items():
        datatype = _DATATYPES.get(tensor.datatype)
        if datatype is None:
            raise Unsupported(
                f"unable to process {side} '{name}' for '{model}', unsupported datatype '{tensor.datatype}'. The "
                f"protocol has: {', '.join(_DATATYPES)}; export the model with a signature of those"
            )
        dims = tensor.dims
        if dims is None:
            dims = (*batch, *model_dims(declared.get(name, {})))
            if dims == batch:
                raise InvalidArgument(
                    f"unable to autofill for '{model}': the rank of model tensor '{name}' is 0 and dimensions are not "
                    f"defined. The model does not say how many dimensions '{name}' has: write dims for it"
                )
        found[name] = GraphTensor(name, datatype, dims)
    return found
