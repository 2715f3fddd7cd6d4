"""Reads pages: asks one model where words are, cuts them out, and asks another what their letters are."""

import io
from pathlib import Path

import numpy as np
from letters import boxes, letters
from PIL import Image, UnidentifiedImageError

import triton_python_backend_utils as pb_utils

CELL = 4
"""Pixels of the page for each value of the map of words."""
MOST = 1 << 24
"""Pixels of a page."""


class TritonPythonModel:
    def initialize(self, args):
        self.alphabet = (Path(__file__).parents[1] / "alphabet.txt").read_text().strip()

    async def execute(self, requests):
        return [await self.response(request) for request in requests]

    async def response(self, request):
        """Return words and boxes of a page, or what is wrong with it."""
        try:
            page = decoded(pb_utils.get_input_tensor_by_name(request, "page").as_numpy()[0])
        except ValueError as error:
            wrong = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=wrong)
        words_map = await asked("detect", "page", page[None, None], "words_map")
        found = boxes(words_map[0, 0], CELL)
        ink = 1 - page
        cut = [list(letters(ink[top:bottom, left:right])) for left, top, right, bottom in found]
        kept = [(box, word) for box, word in zip(found, cut, strict=True) if word]
        words = [""] * len(kept)
        if kept:
            # The letters of all words in one request.
            scores = await asked("recognise", "letters", np.stack([one for _, word in kept for one in word]), "scores")
            read = iter(scores.argmax(axis=1))
            words = ["".join(self.alphabet[next(read)] for _ in word) for _, word in kept]
        texts = np.array([word.encode() for word in words], dtype=object)
        places = np.array([box for box, _ in kept], np.int32).reshape(-1, 4)
        return pb_utils.InferenceResponse([pb_utils.Tensor("words", texts), pb_utils.Tensor("boxes", places)])


async def asked(model, name, array, output):
    """Return an output of another model. Raises what it answers instead."""
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array, np.float32))]
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=[output], inputs=tensors)
    response = await request.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()


def decoded(data):
    """Return a page as a matrix of 0 for black to 1 for white, of whole cells. Raises ``ValueError``."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MOST:
                raise ValueError(f"the page has {image.width} x {image.height} pixels, and may have {MOST:,}")
            page = np.asarray(image.convert("L"), np.float32) / 255
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"the page cannot be read: {error}") from None
    height, width = (length // CELL * CELL for length in page.shape)
    if not (height and width):
        raise ValueError(f"the page is too small: it needs {CELL} x {CELL} pixels")
    return page[:height, :width]
