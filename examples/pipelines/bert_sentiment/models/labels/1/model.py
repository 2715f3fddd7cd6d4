"""Says what BERT's logits mean."""

from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        lines = (Path(__file__).parents[1] / "labels.txt").read_bytes().split()
        self.labels = np.array(lines, dtype=object)

    def execute(self, requests):
        return [self.response(pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()) for request in requests]

    def response(self, logits):
        """Return label and probabilities of each row."""
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
        label = self.labels[logits.argmax(axis=1)].reshape(-1, 1)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("label", label), pb_utils.Tensor("probabilities", probabilities)]
        )
