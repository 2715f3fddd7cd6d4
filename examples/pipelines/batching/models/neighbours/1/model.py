"""Nearest neighbours, exactly: one multiplication of matrices for all requests of a batch."""

from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

NEIGHBOURS = 5


class TritonPythonModel:
    def initialize(self, args):
        stored = np.load(Path(__file__).with_name("index.npz"))
        self.vectors, self.digits = stored["vectors"], stored["digits"]
        self.squares = (self.vectors**2).sum(axis=1)

    def execute(self, requests):
        asked = [pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy() for request in requests]
        digit, votes = self.read(np.concatenate(asked))
        ends = np.cumsum([len(pixels) for pixels in asked])[:-1]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("digit", of_one), pb_utils.Tensor("votes", votes_of_one)])
            for of_one, votes_of_one in zip(np.split(digit, ends), np.split(votes, ends), strict=True)
        ]

    def read(self, pixels):
        """Return for each row what most of its nearest neighbours are, and how many of them."""
        # The square of a distance, but for a part that is the same for all neighbours of a row.
        distances = self.squares - 2 * pixels @ self.vectors.T
        nearest = np.argpartition(distances, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        counts = (self.digits[nearest][:, :, None] == np.arange(10)).sum(axis=1)
        digit = counts.argmax(axis=1, keepdims=True).astype(np.int32)
        return digit, counts.max(axis=1, keepdims=True).astype(np.int32)
