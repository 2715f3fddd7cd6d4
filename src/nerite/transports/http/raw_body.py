"""A body that is the bytes of the model's only input, without any JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes


def read(signature: Signature, body: memoryview) -> tuple[TensorSpec, tuple[int, int] | Buffer]:
    """Return the tensor that a body is, and its place in the body or its bytes. Raises Triton's errors."""
    size = len(body)
    inputs = list(signature.inputs.values())
    if len(inputs) != 1:
        raise InvalidArgument(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{signature.model_name}' model configuration"
        )
    declared = inputs[0]
    batch = (1,) if signature.max_batch_size > 0 else ()
    if declared.datatype is dtypes.BYTES:
        if declared.dims != (1,):
            raise InvalidArgument(f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]")
        return TensorSpec(declared.name, declared.datatype, (*batch, 1)), join_bytes([bytes(body)])
    shape = _deduced(declared.name, declared.dims, size // declared.datatype.size)
    spec = TensorSpec(declared.name, declared.datatype, (*batch, *shape))
    if spec.byte_size != size:
        # Triton's name for an input that nobody has named.
        raise InvalidArgument(
            f"input byte size mismatch for input 'raw_input' for model '{signature.model_name}'. "
            f"Expected {spec.byte_size}, got {size} (a body that is empty, or whose "
            f"Inference-Header-Content-Length is 0, is the data of '{declared.name}' without any JSON)"
        )
    return spec, (0, size)


def _deduced(name: str, dims: Sequence[int], elements: int) -> tuple[int, ...]:
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    known = math.prod(size for size in dims if size != -1)
    return tuple(elements // known if size == -1 and known else size for size in dims)
