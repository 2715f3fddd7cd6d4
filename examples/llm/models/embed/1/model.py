"""Embeds texts: the sum of the vectors of their tokens, which have the weight of each in their length."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(__file__).parent
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vectors = np.load(folder / "vectors.npy")

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            embedding = np.stack([self.embed(text.decode()) for (text,) in texts])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", embedding)]))
        return responses

    def embed(self, text):
        """Return the vector of a text; all zero if it is empty."""
        vector = self.vectors[self.tokenizer.encode(text).ids].sum(axis=0, dtype=np.float32)
        return vector / (np.linalg.norm(vector) or 1)
