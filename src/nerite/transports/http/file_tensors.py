"""Files as tensors: a picture, a recording or a document as it is on the disk, without JSON around it."""

from __future__ import annotations

from typing import Final

from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.signature import Input, show
from nerite.core.tensor import Buffer, TensorSpec, buffer_of
from nerite.transports.http import json_tensors, pixels
from nerite.transports.http.json_text import parse
from nerite.transports.http.multipart import Part

_FILES: Final = ("image/", "audio/", "video/", "application/pdf")
_JSON: Final = ("", "application/json")


def is_file(media_type: str) -> bool:
    """Say whether a body of a type is a file. All other types are what Triton takes them for: JSON, or raw bytes."""
    return media_type.startswith(_FILES)


def takes_long(declared: Input, part: Part) -> bool:
    """Say whether ``read`` works for so long that others should not have to wait."""
    return part.media_type.startswith("image/") and pixels.takes(declared)


def is_json(declared: Input, part: Part) -> bool:
    """Say whether a part is JSON, and no file."""
    return declared.datatype is not dtypes.BYTES and part.media_type in _JSON


def read(declared: Input, batched: bool, part: Part, max_size: int, half: bool) -> tuple[TensorSpec, Buffer]:
    """Return the tensor that a part is: the one element of a BYTES input, pixels, JSON numbers, or plain bytes.

    No more than ``max_size`` bytes of pixels are made. ``half``: numbers may be FP16 and BF16. Raises ``NeriteError``
    for what the input does not take.
    """
    if is_json(declared, part):
        value = parse(bytes(part.data))
        elements = json_tensors.flat(value if isinstance(value, list) else [value])
        spec = TensorSpec(declared.name, declared.datatype, json_tensors.shape_of(declared, batched, len(elements)))
        return spec, json_tensors.read(spec, elements, half)
    shape, data = _file(declared, part, max_size)
    return TensorSpec(declared.name, declared.datatype, (1, *shape) if batched else shape), data


def _file(declared: Input, part: Part, max_size: int) -> tuple[tuple[int, ...], Buffer]:
    if declared.datatype is dtypes.BYTES and all(dim in (1, -1) for dim in declared.dims):
        return (1,) * len(declared.dims), b"".join((len(part.data).to_bytes(4, "little"), part.data))
    if takes_long(declared, part):
        array = pixels.read(declared, part.data, max_size)
        return array.shape, buffer_of(array, declared.datatype)
    if declared.datatype is dtypes.UINT8 and declared.dims in ((-1,), (len(part.data),)):
        return (len(part.data),), part.data
    given = f"file of type '{part.media_type}'" if part.media_type else "single string"
    raise InvalidArgument(
        f"input '{declared.name}' is {declared.datatype.name} {show(declared.dims)}, which takes no {given}. "
        "A file can be the one element of a BYTES input or all of a UINT8 input with one "
        "dimension; an image also the pixels of a UINT8 input with dimensions [height,width,channels], "
        "[channels,height,width] or [height,width], where channels is 1, 3 or 4"
    )
