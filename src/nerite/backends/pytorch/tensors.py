"""Between numpy's arrays and PyTorch's tensors: views, where nobody writes and everything is in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nerite.backends.arrays.replies import SMALL
from nerite.backends.ports import Port
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array

Take: TypeAlias = Callable[[Array], Any]
"""Makes of an input what the program is given."""

TORCH: Final[dict[DataType, torch.dtype]] = {
    dtypes.BOOL: torch.bool,
    dtypes.UINT8: torch.uint8,
    dtypes.UINT16: torch.uint16,
    dtypes.UINT32: torch.uint32,
    dtypes.UINT64: torch.uint64,
    dtypes.INT8: torch.int8,
    dtypes.INT16: torch.int16,
    dtypes.INT32: torch.int32,
    dtypes.INT64: torch.int64,
    dtypes.FP16: torch.float16,
    dtypes.FP32: torch.float32,
    dtypes.FP64: torch.float64,
    dtypes.BF16: torch.bfloat16,
}
DATATYPES: Final = {kind: datatype for datatype, kind in TORCH.items()}


def taker(datatype: DataType, *, copied: bool, device: str) -> Take:
    """Return what makes tensors of arrays of this type. ``copied``: the program may write into them."""
    if datatype is dtypes.BYTES:
        return _strings

    def take(array: Array) -> torch.Tensor:
        # A tensor in the middle of a message begins where it likes; what computes expects it at a multiple of its size.
        return torch.from_numpy(array.copy() if copied or not array.flags.aligned else array)

    def narrow(array: Array) -> torch.Tensor:
        return take(array).view(torch.bfloat16)

    cpu = narrow if datatype is dtypes.BF16 else take
    if device in ("", "cpu"):
        return cpu
    return lambda array: cpu(array).to(device, non_blocking=True)


def give(port: Port, value: Any, inputs: Sequence[Any], *, copied: bool) -> Array:
    """Return an output as an array: a view, if nobody will write there while it is sent.

    ``inputs`` are those that it was computed from, whose memory may be used again. ``copied``: the program may write
    into what it has given out. Raises ``InvalidArgument`` where it is not what the configuration says.
    """
    if not isinstance(value, torch.Tensor):
        return _text(port, value)
    expected = TORCH.get(port.datatype)
    if value.dtype is not expected:
        raise _wrong_type(port, str(DATATYPES[value.dtype].name if value.dtype in DATATYPES else value.dtype))
    tensor = (value.detach() if value.requires_grad else value).cpu().contiguous()
    # What is smaller is copied into the response.
    if tensor.nbytes > SMALL and (copied or _is_shared(tensor, inputs)):
        tensor = tensor.clone()
    array: Array = tensor.view(torch.uint16).numpy() if expected is torch.bfloat16 else tensor.numpy()
    return _shaped(port, array)


def _is_shared(tensor: torch.Tensor, inputs: Sequence[Any]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == storage for each in inputs)


def _shaped(port: Port, array: Array) -> Array:
    # A configuration cannot declare a scalar without its reshape; what it declares instead has one element, too.
    return array.reshape(1) if not array.ndim and port.model_dims == (1,) and not port.batching else array


def _strings(array: Array) -> list[Any]:
    texts: list[Any] = array.reshape(-1).tolist()
    return texts


def _text(port: Port, value: Any) -> Array:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise InvalidArgument(
            f"output '{port.name}' must be of type Tensor or List[str], received {type(value).__name__}. Return "
            "tensors, lists of strings, and tuples or dictionaries of them"
        )
    if port.datatype is not dtypes.BYTES:
        raise _wrong_type(port, dtypes.BYTES.name)
    array = np.array(value, object)
    return array.reshape(-1, 1) if port.batching and port.model_dims == (1,) else array


def _wrong_type(port: Port, provided: str) -> InvalidArgument:
    known = dtypes.BY_NAME.get(provided)
    return InvalidArgument(
        f"configuration expects datatype TYPE_{port.datatype.name} for output '{port.name}', model provides "
        f"TYPE_{provided}. {f'Set data_type: {known.config_name}' if known else 'The protocol has no such type'}"
    )
