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
_MOST_PIXELS: Final = 64 * 1024 * 1024
"""Of one image: three times as many bytes."""


def pixels(files: Sequence[bytes]) -> tuple[Array, ...]:
    """Return the images as arrays of height, width and RGB. Raises ``NeriteError`` for what is no image."""
    return tuple(_pixels(f"'image' {place}", each) for place, each in enumerate(files))


def _pixels(name: str, file: bytes) -> Array:
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            "images are decoded by Pillow, which is not installed where the model runs: pip install 'nerite[image]'"
        ) from None
    try:
        with PIL.Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise InvalidArgument(
                    f"{name} is {image.width} wide and {image.height} high, and may have {_MOST_PIXELS} pixels"
                )
            return np.array(image.convert("RGB"))
    except InvalidArgument:
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidArgument(f"{name} is none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to
        raise InvalidArgument(f"{name} can not be read: {type(error).__name__}: {error}") from None
