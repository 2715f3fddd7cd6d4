"""Images of requests: read from base64, and decoded by Pillow, which is imported only when a request has some."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array, decode_bytes

IMAGE: Final = "image"
"""Name of the input."""
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Common formats. Pillow reads others with external programs that should not be given untrusted files."""
MAX_IMAGES: Final = 64
"""Maximum number of images per request."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of all image files of a request together, in base64."""
MAX_PIXELS: Final = 64 * 1024 * 1024
"""Maximum number of pixels per image. Each takes three bytes, and up to 20 while it is decoded."""
_MAX_TOGETHER: Final = 2 * MAX_PIXELS
"""Maximum number of pixels of all images of a request together."""


def pixels(files: Sequence[bytes]) -> tuple[Array, ...]:
    """Return the images as arrays of height, width and RGB. Raises ``NeriteError`` for files that are not images.

    The sizes of all images are checked before the first is decoded.
    """
    if not files:
        return ()
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            "images need Pillow, which is not installed where the model runs: pip install 'nerite[image]'"
        ) from None
    place = 0
    try:
        together, images = 0, []
        for place, file in enumerate(files):
            image = PIL.Image.open(io.BytesIO(file), formats=_FORMATS)
            size = image.width * image.height
            together += size
            if size > MAX_PIXELS or together > _MAX_TOGETHER:
                scope, most = ("", MAX_PIXELS) if size > MAX_PIXELS else (" of all together", _MAX_TOGETHER)
                raise InvalidArgument(
                    f"'image' {place} has {image.width} x {image.height} pixels; the maximum{scope} is {most} pixels"
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
        raise InvalidArgument(f"'image' {place} is not in one of the formats {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow's readers may raise anything for a broken file
        raise InvalidArgument(f"'image' {place} cannot be read: {type(error).__name__}: {error}") from None
    return tuple(decoded)


def read_images(request: InferenceRequest) -> Iterator[bytes]:
    """Yield the image files, which requests carry in base64."""
    for spec, data in zip(request.header.inputs, request.buffers, strict=True):
        if spec.name == IMAGE:
            if spec.elements > MAX_IMAGES:
                raise InvalidArgument(f"'image' has {spec.elements} images; the maximum is {MAX_IMAGES}")
            if len(data) > MAX_BYTES:
                raise InvalidArgument(f"'image' has {len(data)} bytes; the maximum is {MAX_BYTES}")
            for place, encoded in enumerate(decode_bytes(data, spec.elements)):
                try:
                    yield base64.b64decode(encoded, validate=True)
                except binascii.Error as error:
                    raise InvalidArgument(f"'image' {place} is not valid base64: {error}") from None
