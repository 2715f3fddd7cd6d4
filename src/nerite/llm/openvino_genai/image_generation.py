"""Images by OpenVINO GenAI's pipeline for diffusion models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import translated
from nerite.llm.image_generation import ImageSettings
from nerite.llm.openvino_genai.framework import genai
from nerite.llm.openvino_genai.options import ImageGeneratorOptions

_SIDE = 8
"""Pixels by which sizes are divisible: no known model asks for fewer."""


class OpenVinoImageGenerator:
    """ImageGenerator with OpenVINO GenAI's pipeline."""

    def __init__(self, options: ImageGeneratorOptions) -> None:
        """Raises ``NeriteError``."""
        try:
            self._pipeline: Any = genai().Text2ImagePipeline(
                str(options.directory), options.device, **options.properties
            )
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise translated(error, "loading model") from error

    def generate(self, text: str, settings: ImageSettings, goes_on: Callable[[], bool]) -> Array:
        """Return the pixels: height, width, and three channels of 8 bits. Raises ``NeriteError``.

        ``goes_on`` is called at each step. If it returns False, the pixels may be anything.
        """
        if not text.strip():
            raise InvalidArgument("'text_input' is empty")
        for name, size in (("width", settings.width), ("height", settings.height)):
            if size % _SIDE:
                raise InvalidArgument(f"'{name}' is {size}; it must be divisible by {_SIDE}")
        # The framework's default seed is the same for all requests.
        given: dict[str, Any] = {"rng_seed": random.getrandbits(63) if settings.seed is None else settings.seed % 2**63}
        if settings.width:
            given["width"] = settings.width
        if settings.height:
            given["height"] = settings.height
        if settings.steps:
            given["num_inference_steps"] = settings.steps
        if settings.guidance is not None:
            given["guidance_scale"] = settings.guidance
        if settings.avoided:
            given["negative_prompt"] = settings.avoided
        try:
            made = self._pipeline.generate(text, callback=lambda _step, _steps, _latent: not goes_on(), **given)
        except RuntimeError as error:
            raise translated(error, "generating an image") from error
        # Copied, because the pipeline uses the memory again. It has no pixels if it was stopped.
        pixels = np.array(made.data, np.uint8)
        return pixels[0] if pixels.ndim == 4 else np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None:
        """Release the model."""
        self._pipeline = None
