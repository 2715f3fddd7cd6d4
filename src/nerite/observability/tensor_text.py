"""Tensors as text, as traces have them."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core import dtype as dtypes
from nerite.core.errors import NeriteError
from nerite.core.tensor import Buffer, TensorSpec, to_array


def described(spec: TensorSpec, data: Buffer) -> dict[str, str]:
    """Return a tensor as text: elements and dimensions with commas between them, as Triton has it."""
    return {
        "name": spec.name,
        "data": ",".join(_elements(spec, data)),
        "shape": ",".join(map(str, spec.shape)),
        "dtype": spec.datatype.name,
    }


def _elements(spec: TensorSpec, data: Buffer) -> Sequence[str]:
    try:
        array = to_array(spec, data)
    except (NeriteError, ValueError, TypeError):
        return ["?"]
    if spec.datatype is dtypes.BYTES:
        return [f'"{element.decode(errors="backslashreplace")}"' for element in array.flat]
    if spec.datatype is dtypes.BOOL:
        array = array.view("u1")
    elif spec.datatype is dtypes.BF16:
        array = (array.astype("<u4") << 16).view("<f4")
    return [str(element) for element in array.flat]
