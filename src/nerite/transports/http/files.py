"""Converts request bodies without Triton's JSON to tensors: forms, files such as images, and raw bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.signature import Signature, SignatureInput, shape_text
from nerite.core.tensor import Array, Buffer, TensorSpec, buffer_of, join_bytes
from nerite.transports.http import json_tensors
from nerite.transports.http.head import MAX_HEAD, header_bytes_of, header_text_of
from nerite.transports.http.json_text import parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

# Forms: bodies of type ``multipart/form-data`` with one part for each input.

TYPE: Final = "multipart/form-data"
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_FORM_DATA: Final = re.compile(r"form-data(?=\s*(?:;|$))", re.IGNORECASE)
_PARAMETER: Final = re.compile(r'\s*;\s*([^\s=;"]+)=(?:"((?:[^"\\]++|\\.)*+)"|([^\s;"]*))')
_BEHIND_BOUNDARY: Final = re.compile(rb"[ \t]*\r\n")
_MAX_PART_FIELDS: Final = 32
_MAX_PARTS: Final = 1024
_UNKNOWN: Final = "application/octet-stream"
"""Media type of a file without a content type."""


class FormPart(NamedTuple):
    """A part of a form, or a whole body that is one file."""

    name: str
    media_type: str
    """Empty for a plain form field."""
    data: Buffer
    file_name: str = ""
    """As the client has named the file; empty if it has not."""


def form_media_type(content_type: str) -> str:
    """Return a content type in lower case, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def parse_multipart(content_type: str, body: Buffer) -> list[FormPart]:
    """Split a form into its parts. Raises ``InvalidArgument`` if it is malformed."""
    found = _BOUNDARY.findall(content_type)
    if len(found) != 1:
        raise InvalidArgument(f"a body of type {TYPE} needs a boundary in its Content-Type, one, got: {content_type}")
    delimiter = b"\r\n--" + header_bytes_of("".join(found[0]))
    # The first delimiter need not follow a line break.
    _, *pieces = b"".join((b"\r\n", body)).split(delimiter, _MAX_PARTS + 1)
    if pieces and delimiter in pieces[-1]:
        raise InvalidArgument(f"the form has more than {_MAX_PARTS} parts")
    if not pieces or not pieces[-1].startswith(b"--"):
        raise InvalidArgument(f"the body is not a complete form of type {TYPE}: the closing boundary is missing")
    return [_part(number, piece) for number, piece in enumerate(pieces[:-1], start=1)]


def _part(number: int, piece: bytes) -> FormPart:
    behind = _BEHIND_BOUNDARY.match(piece)
    if behind is None:
        raise InvalidArgument(f"part {number} of the form does not begin on a line of its own")
    start, end = behind.end(), piece.find(b"\r\n\r\n", behind.end() - 2)
    text = checked(header_text_of(piece[start : max(end, start)]), f"the head of part {number} of the form", MAX_HEAD)
    lines = text.split("\r\n", _MAX_PART_FIELDS)
    headers = [(key.strip().lower(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    named = [value for key, value in headers if key == "content-disposition"]
    if len(lines) > _MAX_PART_FIELDS or len(named) > 1:
        what = f"more than {_MAX_PART_FIELDS} headers, or two of Content-Disposition"
        raise InvalidArgument(f"part {number} of the form has {what}")
    parameters = _disposition(named[0], number) if named else {}
    if "name" not in parameters:
        raise InvalidArgument(f"part {number} of the form has no name: it must have the name of an input")
    given = form_media_type(dict(headers).get("content-type", ""))
    file = parameters.get("filename", parameters.get("filename*"))
    media_type = given or ("" if file is None else _UNKNOWN)
    return FormPart(parameters["name"], media_type, memoryview(piece)[end + 4 :], file or "")


def _disposition(value: str, number: int) -> dict[str, str]:
    """Return the parameters of a part. Raises ``InvalidArgument`` for what others may read differently."""
    found: dict[str, str] = {}
    match = _FORM_DATA.match(value)
    at = 0
    while match is not None:
        at = match.end()
        if match.re is _PARAMETER:
            name = match[1].lower()
            if name in found or name == "name*":
                break
            found[name] = match[2] if match[2] is not None else match[3]
        match = _PARAMETER.match(value, at)
    if match is not None or value[at:].strip("; \t"):
        raise InvalidArgument(f"part {number} of the form has a Content-Disposition that is not clear: {value}")
    return found


# Images: JPEG, PNG and other formats are decoded to pixels by Pillow, which is imported only when it is needed.
#
# An input takes pixels if it is UINT8 with three dimensions, of which the last (height, width, channels) or else the
# first (channels, height, width) is 1, 3 or 4: grey, RGB or RGBA; or with two dimensions (height, width): grey. Height
# and width may be fixed or variable. Images are converted to these channels, and never resized.

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted formats. Pillow reads more, some with external programs that must not process untrusted files."""


def takes_image(declared: SignatureInput) -> bool:
    """Return whether an input takes pixels."""
    dims = declared.dims
    fits = len(dims) == 2 or (len(dims) == 3 and (dims[2] in _MODES or dims[0] in _MODES))
    return fits and declared.datatype is dtypes.UINT8


def read_image(declared: SignatureInput, data: Buffer, max_size: int) -> Array:
    """Return the pixels of an encoded image, at most ``max_size`` bytes. Takes milliseconds: do not call on the loop.

    Raises ``InvalidArgument`` if ``data`` is not an image or does not have the declared size.
    """
    module = _pillow(declared)
    channels, first = _channels(declared.dims)
    try:
        with module.open(io.BytesIO(data), formats=_FORMATS) as image:
            size = (image.height, image.width)
            shape = size if len(declared.dims) == 2 else (channels, *size) if first else (*size, channels)
            _check_image(declared, image, shape, max_size)
            pixels: Array = np.array(image.convert(_MODES[channels]))
    except InvalidArgument:
        raise
    except Exception as error:  # Pillow's readers may raise any exception for a broken file
        raise InvalidArgument(
            f"the image for input '{declared.name}' can not be read: {_reason(error, module)}"
        ) from None
    if first and channels > 1:
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return pixels.reshape(shape)


def _channels(dims: Sequence[int]) -> tuple[int, bool]:
    """Return the required number of channels, and whether they are the first dimension."""
    if len(dims) == 2:
        return 1, False
    return (dims[2], False) if dims[2] in _MODES else (dims[0], True)


def _pillow(declared: SignatureInput) -> Any:
    """Return Pillow's module. Raises ``Unsupported`` if it is not installed."""
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            f"images for input '{declared.name}' are decoded by Pillow, which is not installed on the server: "
            "pip install 'nerite[image]'"
        ) from None
    return PIL.Image


def _check_image(declared: SignatureInput, image: Image, shape: Sequence[int], max_size: int) -> None:
    """Reject an image that does not fit the input, before it is decoded."""
    if any(dim not in (-1, size) for dim, size in zip(declared.dims, shape, strict=True)):
        raise InvalidArgument(
            f"unexpected size of the image for input '{declared.name}': expected {shape_text(declared.dims)}, got "
            f"{shape_text(shape)} (it is {image.width} wide and {image.height} high; images are not resized)"
        )
    if image.mode[:1] in ("I", "F"):
        raise InvalidArgument(
            f"the image for input '{declared.name}' has more than 8 bits a channel, which UINT8 can not hold"
        )
    if math.prod(shape) > max_size:
        raise InvalidArgument(
            f"the image for input '{declared.name}' has {math.prod(shape)} bytes of pixels, which exceeds the maximum "
            f"allowed value of {max_size} bytes. Use --http-max-input-size to increase the limit."
        )


def _reason(error: Exception, module: Any) -> str:
    if isinstance(error, module.DecompressionBombError):
        return str(error)
    if isinstance(error, module.UnidentifiedImageError):
        return f"it is none of {', '.join(_FORMATS)}"
    return f"{type(error).__name__}: {error}"


_FILES: Final = ("image/", "audio/", "video/", "application/pdf")
_JSON: Final = ("", "application/json")


def is_file(media_type: str) -> bool:
    """Return whether a body of this type is a file. Other types are treated as in Triton: as JSON or raw bytes."""
    return media_type.startswith(_FILES)


def takes_long(declared: SignatureInput, part: FormPart) -> bool:
    """Return whether ``read_file`` takes so long for this part that it should run in a thread."""
    return part.media_type.startswith("image/") and takes_image(declared)


def is_json(declared: SignatureInput, part: FormPart) -> bool:
    """Return whether a part is JSON, not a file."""
    return declared.datatype is not dtypes.BYTES and part.media_type in _JSON


def read_file(
    declared: SignatureInput, batched: bool, part: FormPart, max_size: int, half: bool
) -> tuple[TensorSpec, Buffer]:
    """Convert a part to a tensor: the one element of a BYTES input, pixels, JSON numbers, or plain bytes.

    ``max_size`` limits the bytes of pixels. ``half``: numbers may be FP16 and BF16. Raises ``NeriteError`` if the part
    does not fit the input.
    """
    if is_json(declared, part):
        value = parse_json(bytes(part.data))
        elements = json_tensors.flat(value if isinstance(value, list) else [value])
        spec = TensorSpec(declared.name, declared.datatype, json_tensors.shape_of(declared, batched, len(elements)))
        return spec, json_tensors.read_tensor(spec, elements, half)
    shape, data = _file_data(declared, part, max_size)
    return TensorSpec(declared.name, declared.datatype, (1, *shape) if batched else shape), data


def _file_data(declared: SignatureInput, part: FormPart, max_size: int) -> tuple[tuple[int, ...], Buffer]:
    if declared.datatype is dtypes.BYTES and all(dim in (1, -1) for dim in declared.dims):
        return (1,) * len(declared.dims), b"".join((len(part.data).to_bytes(4, "little"), part.data))
    if takes_long(declared, part):
        array = read_image(declared, part.data, max_size)
        return array.shape, buffer_of(array, declared.datatype)
    if declared.datatype is dtypes.UINT8 and declared.dims in ((-1,), (len(part.data),)):
        return (len(part.data),), part.data
    given = f"file of type '{part.media_type}'" if part.media_type else "single string"
    raise InvalidArgument(
        f"input '{declared.name}' is {declared.datatype.name} {shape_text(declared.dims)}, which takes no {given}. "
        "A file can be the one element of a BYTES input or all of a UINT8 input with one "
        "dimension; an image also the pixels of a UINT8 input with dimensions [height,width,channels], "
        "[channels,height,width] or [height,width], where channels is 1, 3 or 4"
    )


# Raw bodies: the data of the model's only input, without any JSON.


def read_raw_body(signature: Signature, body: memoryview) -> tuple[TensorSpec, tuple[int, int] | Buffer]:
    """Return the spec of the tensor in a raw body, and its place in the body or its bytes. Raises Triton's errors."""
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
    shape = _deduced_shape(declared.name, declared.dims, size // declared.datatype.size)
    spec = TensorSpec(declared.name, declared.datatype, (*batch, *shape))
    if spec.byte_size != size:
        # 'raw_input' is Triton's name for the unnamed input.
        raise InvalidArgument(
            f"input byte size mismatch for input 'raw_input' for model '{signature.model_name}'. "
            f"Expected {spec.byte_size}, got {size} (a body that is empty, or whose "
            f"Inference-Header-Content-Length is 0, is the data of '{declared.name}' without any JSON)"
        )
    return spec, (0, size)


def _deduced_shape(name: str, dims: Sequence[int], elements: int) -> tuple[int, ...]:
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    known = math.prod(size for size in dims if size != -1)
    return tuple(elements // known if size == -1 and known else size for size in dims)
