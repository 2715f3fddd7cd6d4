"""Images as tensors: JPEG, PNG and the like to the pixels that a model takes. Needs Pillow, and only then imports it.

A model takes pixels if its input is UINT8 with three dimensions, of which the last (height, width, channels) or else
the first (channels, height, width) is 1, 3 or 4: grey, RGB or RGBA; or with two (height, width), which is grey too.
Height and width may be fixed or variable. Images are converted to these channels, and never resized.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.signature import Input, show
from nerite.core.tensor import Array, Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What people send. Pillow reads more, some of it with the help of programs that should not see strangers' files."""


def takes(declared: Input) -> bool:
    """Say whether an input takes pixels."""
    dims = declared.dims
    fits = len(dims) == 2 or (len(dims) == 3 and (dims[2] in _MODES or dims[0] in _MODES))
    return fits and declared.datatype is dtypes.UINT8


def read(declared: Input, data: Buffer, max_size: int) -> Array:
    """Return the pixels of an encoded image, of at most ``max_size`` bytes. Takes milliseconds: not for the loop.

    Raises ``InvalidArgument`` for what is no image, or not of the declared size.
    """
    module = _pillow(declared)
    channels, first = _channels(declared.dims)
    try:
        with module.open(io.BytesIO(data), formats=_FORMATS) as image:
            size = (image.height, image.width)
            shape = size if len(declared.dims) == 2 else (channels, *size) if first else (*size, channels)
            _check(declared, image, shape, max_size)
            pixels: Array = np.array(image.convert(_MODES[channels]))
    except InvalidArgument:
        raise
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to
        raise InvalidArgument(
            f"the image for input '{declared.name}' can not be read: {_told(error, module)}"
        ) from None
    if first and channels > 1:
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return pixels.reshape(shape)


def _channels(dims: Sequence[int]) -> tuple[int, bool]:
    """Return how many channels an image has to have, and whether they are the first dimension."""
    if len(dims) == 2:
        return 1, False
    return (dims[2], False) if dims[2] in _MODES else (dims[0], True)


def _pillow(declared: Input) -> Any:
    """Return Pillow's module. Raises ``Unsupported`` where it is not installed."""
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            f"images for input '{declared.name}' are decoded by Pillow, which is not installed where the server runs: "
            "pip install 'nerite[image]'"
        ) from None
    return PIL.Image


def _check(declared: Input, image: Image, shape: Sequence[int], max_size: int) -> None:
    """Refuse an image before it is decoded, if it does not fit."""
    if any(dim not in (-1, size) for dim, size in zip(declared.dims, shape, strict=True)):
        raise InvalidArgument(
            f"unexpected size of the image for input '{declared.name}': expected {show(declared.dims)}, got "
            f"{show(shape)} (it is {image.width} wide and {image.height} high; images are not resized)"
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


def _told(error: Exception, module: Any) -> str:
    if isinstance(error, module.DecompressionBombError):
        return str(error)
    if isinstance(error, module.UnidentifiedImageError):
        return f"it is none of {', '.join(_FORMATS)}"
    return f"{type(error).__name__}: {error}"
