"""Finds the regions that stand out from the background, without any learning: classical image processing."""

import numpy as np
from scipy import ndimage

import triton_python_backend_utils as pb_utils

BOXES = 8
CONTRAST = 60
"""How far a pixel has to be from the background, of 255 in the colour that differs most."""


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            pictures = pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy()
            boxes = np.stack([regions(pixels) for pixels in pictures])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("boxes", boxes)]))
        return responses


def regions(pixels):
    """Return the boxes of the largest connected regions of ``pixels``, (height, width, 3), largest first."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    stands_out = np.abs(pixels - background).max(axis=2) > CONTRAST
    height, width = stands_out.shape
    found = [
        (
            columns.start / width,
            rows.start / height,
            columns.stop / width,
            rows.stop / height,
            stands_out[rows, columns].mean(),
        )
        for rows, columns in ndimage.find_objects(ndimage.label(stands_out)[0])
    ]
    found.sort(key=lambda box: (box[0] - box[2]) * (box[3] - box[1]))
    boxes = np.zeros((BOXES, 5), np.float32)
    boxes[: len(found)] = found[:BOXES] or boxes[:0]
    return boxes
