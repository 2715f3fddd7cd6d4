"""Finds what may answer a question, and asks for the answer: retrieval, and the prompt that makes use of it."""

import json
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

COUNT = 3
PROMPT = "<|im_start|>user\n{passage}\n{question}<|im_end|>\n<|im_start|>assistant\n"
"""As the model was trained on it: see lessons.py."""


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(__file__).parent
        self.vectors = np.load(folder / "vectors.npy")
        self.passages = json.loads((folder / "passages.json").read_text())

    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        """Return the nearest passages, and the prompt with them."""
        question = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        embedding = pb_utils.get_input_tensor_by_name(request, "embedding").as_numpy()[0]
        nearest = [self.passages[number] for number in np.argsort(-(self.vectors @ embedding), kind="stable")[:COUNT]]
        # A larger model would take all of them.
        prompt = PROMPT.format(passage=nearest[0], question=question)
        return pb_utils.InferenceResponse([strings("prompt", [prompt]), strings("passages", nearest)])


def strings(name, texts):
    """Return texts as a tensor."""
    return pb_utils.Tensor(name, np.array([text.encode() for text in texts], dtype=object))
