"""Instances of models that generate images. A request is one image, and its response a PNG file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.embedding import decoded
from nerite.llm.streaming import CANCELLED, ResponseHeaders

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


class ImageGenerator(Protocol):
    """Generates images from prompts."""

    def generate(self, text: str, settings: ImageSettings, goes_on: Callable[[], bool]) -> Array:
        """Return the pixels: height, width, and three channels of 8 bits. Raises ``NeriteError``.

        ``goes_on`` is called at each step. If it returns False, the pixels may be anything.
        """

    def close(self) -> None:
        """Release all resources."""


class ImageGenerationInstance:
    """Instance that answers requests with an image generator, one after the other."""

    checks_readiness = False

    def __init__(self, model: ModelContext, image_generator: ImageGenerator) -> None:
        self._generator = image_generator
        self._headers = ResponseHeaders(
            model.name, str(model.version), [output["name"] for output in model.config["output"]]
        )

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Generate the image of each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        pairs = zip(request.header.inputs, request.data, strict=True)
        given = {spec.name: to_array(spec, data).reshape(-1) for spec, data in pairs}
        try:
            text, settings = decoded("text_input", given["text_input"][0]), read_image_settings(given)
            pixels = self._generator.generate(text, settings, lambda: not request.is_cancelled())
            if request.is_cancelled():
                raise Cancelled(CANCELLED)
        except NeriteError as error:
            return InferenceResponse.failed(error)
        return self._headers.response(request, {"image": np.array([png(pixels)], tensor.BYTES.numpy)})

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._generator.close()


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
