"""Embeds texts by latent semantic analysis: the weighted sum of a vector for each word."""

import json
import re
from collections import Counter
from math import log
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(__file__).parent
        stored = json.loads((folder / "words.json").read_text())
        self.pattern = re.compile(stored["pattern"])
        self.numbers = {word: number for number, word in enumerate(stored["words"])}
        self.vectors = np.load(folder / "vectors.npy")

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            vector = np.stack([self.embed(text.decode()) for (text,) in texts])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("vector", vector)]))
        return responses

    def embed(self, text):
        """Return the vector of a text; all zero if it has no word that is known."""
        vector = np.zeros(self.vectors.shape[1], np.float32)
        for word, count in Counter(self.pattern.findall(text.lower())).items():
            if word in self.numbers:
                vector += (1 + log(count)) * self.vectors[self.numbers[word]]
        return vector / (np.linalg.norm(vector) or 1)
