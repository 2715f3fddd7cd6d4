"""Images in a request: files to pixels. Needs Pillow, and only then imports it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

import numpy as np

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.tensor import Array

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What people send. Pillow reads more, some of it with the help of programs that should not see strangers' files."""
MOST_IMAGES: Final = 64
"""In a request."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of all files of a request together, in base64."""
_MOST_PIXELS: Final = 64 * 1024 * 1024
"""Of one image: three times as many bytes."""
_MOST_TOGETHER: Final = 2 * _MOST_PIXELS
"""Of all images of a request."""


def pixels(files: Sequence[bytes]) -> tuple[Array, ...]:
    """Return the images as arrays of height, width and RGB. Raises ``NeriteError`` for what is no image.

    None is decoded before the sizes of all are known to be within the limits.
    """
    if not files:
        return ()
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            "images are decoded by Pillow, which is not installed where the model runs: pip install 'nerite[image]'"
        ) from None
    place = 0
    try:
        together, images = 0, []
        for place, file in enumerate(files):
            image = PIL.Image.open(io.BytesIO(file), formats=_FORMATS)
            size = image.width * image.height
            together += size
            if size > _MOST_PIXELS or together > _MOST_TOGETHER:
                which, most = ("", _MOST_PIXELS) if size > _MOST_PIXELS else (" with those before it", _MOST_TOGETHER)
                raise InvalidArgument(
                    f"'image' {place} is {image.width} wide and {image.height} high, and{which} may have {most} pixels"
                )
            images.append(image)
        decoded: list[Array] = []
        while images:
            place = len(decoded)
            with images.pop(0) as image:
                decoded.append(np.array(image.convert("RGB")))
    except InvalidArgument:
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidArgument(f"'image' {place} is none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to
        raise InvalidArgument(f"'image' {place} can not be read: {type(error).__name__}: {error}") from None
    return tuple(decoded)
