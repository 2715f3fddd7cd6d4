"""Decodes images and brings them to the size that the vision model was trained on."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

import triton_python_backend_utils as pb_utils

SIDE = 64


class TritonPythonModel:
    def execute(self, requests):
        return [self.response(pb_utils.get_input_tensor_by_name(request, "image").as_numpy()) for request in requests]

    def response(self, images):
        """Return the pixels of a request's images, or say which of them is none."""
        pixels = np.empty((len(images), SIDE, SIDE, 3), np.uint8)
        for index, (encoded,) in enumerate(images):
            try:
                image = Image.open(io.BytesIO(encoded)).convert("RGB")
            except (UnidentifiedImageError, OSError) as problem:
                # For this request alone; the others of the batch go on.
                error = pb_utils.TritonError(
                    f"image {index} cannot be read: {problem}", pb_utils.TritonError.INVALID_ARG
                )
                return pb_utils.InferenceResponse(error=error)
            pixels[index] = image.resize((SIDE, SIDE), Image.Resampling.BOX)
        return pb_utils.InferenceResponse([pb_utils.Tensor("pixels", pixels)])
