"""Instances of models that generate images. A request is one image, and its response a PNG file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

import numpy as np

from nerite.core import tensor
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array
from nerite.llm.pipeline_instance import Pipeline, PipelineInstance, check_wanted, decoded

LARGEST: Final = 2048
"""Maximum width and height."""
MAX_STEPS: Final = 500
_MAX_GUIDANCE: Final = 100.0


class ImageSettings(NamedTuple):
    """Settings of a request. Zero and None: the default of the model."""

    width: int = 0
    height: int = 0
    steps: int = 0
    guidance: float | None = None
    """How closely the image follows the prompt."""
    seed: int | None = None
    avoided: str = ""
    """The negative prompt."""


class ImageGenerator(Pipeline, Protocol):
    """Generates images from prompts."""

    def generate(self, text: str, settings: ImageSettings, goes_on: Callable[[], bool]) -> Array:
        """Return the pixels: height, width, and three channels of 8 bits. Raises ``NeriteError``.

        ``goes_on`` is called at each step. If it returns False, the pixels may be anything.
        """


class ImageGenerationInstance(PipelineInstance[ImageGenerator]):
    """Instance that answers requests with an image generator."""

    def _outputs(self, request: InferenceRequest, given: Mapping[str, Array]) -> Mapping[str, Array]:
        text, settings = decoded("text_input", given["text_input"][0]), read_image_settings(given)
        pixels = self._pipeline.generate(text, settings, lambda: not request.is_cancelled())
        check_wanted(request)
        return {"image": np.array([png(pixels)], tensor.BYTES.numpy)}


def read_image_settings(given: Mapping[str, Array]) -> ImageSettings:
    """Return the settings in a request's inputs. Raises ``InvalidArgument``."""

    def number(name: str, low: int, high: int) -> int:
        if name not in given:
            return 0
        value = int(given[name][0])
        if not low <= value <= high:
            raise InvalidArgument(f"'{name}' is {value}; it must be from {low} to {high}")
        return value

    guidance = float(given["guidance_scale"][0]) if "guidance_scale" in given else None
    if guidance is not None and not 0 <= guidance <= _MAX_GUIDANCE:
        raise InvalidArgument(f"'guidance_scale' is {guidance}; it must be from 0 to {_MAX_GUIDANCE:g}")
    return ImageSettings(
        number("width", 8, LARGEST),
        number("height", 8, LARGEST),
        number("num_inference_steps", 1, MAX_STEPS),
        guidance,
        int(given["seed"][0]) if "seed" in given else None,
        decoded("negative_prompt", given["negative_prompt"][0]) if "negative_prompt" in given else "",
    )


def png(pixels: Array) -> bytes:
    """Return pixels (height, width, three channels of 8 bits) as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
