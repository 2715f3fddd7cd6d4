"""Looks at a picture of coloured shapes and says what it sees: classical image processing, in place of a network."""

import base64
import io

import numpy as np
from PIL import Image, UnidentifiedImageError
from scipy import ndimage

import triton_python_backend_utils as pb_utils

SIDE = 96
CONTRAST = 60
"""How far a pixel has to be from the background, of 255 in the colour that differs most."""
COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 200), "yellow": (235, 200, 40)}
SHAPES = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}
"""How much of its box each covers."""
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
PROMPT = "<|im_start|>user\n{question}\n{seen}<|im_end|>\n<|im_start|>assistant\n"
"""As the model was trained on it: see lessons.py."""


class TritonPythonModel:
    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        """Return the question with what is seen below it."""
        question, image = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0] for name in ("text_input", "image")
        )
        try:
            picture = Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError) as problem:
            error = pb_utils.TritonError(f"the image cannot be read: {problem}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        pixels = np.asarray(picture.resize((SIDE, SIDE)), dtype=np.int16)
        prompt = PROMPT.format(question=question.decode(), seen="\n".join(things(pixels)) or "nothing")
        return pb_utils.InferenceResponse([pb_utils.Tensor("prompt", np.array([prompt.encode()], dtype=object))])


def things(pixels):
    """Give colour, shape and place of each region that stands out from the background."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    stands_out = np.abs(pixels - np.median(border, axis=0)).max(axis=2) > CONTRAST
    regions, _ = ndimage.label(stands_out)
    for number, box in enumerate(ndimage.find_objects(regions), 1):
        region = regions[box] == number
        if region.sum() < SIDE:  # a speck
            continue
        shade = pixels[box][region].mean(axis=0)
        colour = min(COLOURS, key=lambda name: np.abs(shade - COLOURS[name]).sum())
        shape = min(SHAPES, key=lambda name: abs(region.mean() - SHAPES[name]))
        row, column = ((side.start + side.stop) * 3 // (2 * SIDE) for side in box)
        yield f"{colour} {shape} {place(ROWS[row], COLUMNS[column])}"


def place(row, column):
    """Return where something is, in words."""
    if not row and not column:
        return "in the middle"
    return f"at the {row} {column}".rstrip() if row else f"on the {column}"
