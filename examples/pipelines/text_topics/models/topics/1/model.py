"""Runs a pipeline of scikit-learn on all texts of a batch at once."""

from pathlib import Path

import joblib
import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(__file__).parent
        # A pickle: it runs what is in it, so load none that somebody else made.
        self.pipeline = joblib.load(folder / "pipeline.joblib")
        labels = (folder.parent / "labels.txt").read_text().split()
        if list(self.pipeline.classes_) != labels:
            raise pb_utils.TritonModelException(f"labels.txt has {labels}, the pipeline {list(self.pipeline.classes_)}")
        self.labels = np.array([label.encode() for label in labels], dtype=object)

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[:, 0] for request in requests]
        together = [text.decode(errors="replace") for part in texts for text in part]
        probabilities = self.pipeline.predict_proba(together).astype(np.float32)
        ends = np.cumsum([len(part) for part in texts])[:-1]
        return [self.response(part) for part in np.split(probabilities, ends)]

    def response(self, probabilities):
        """Return the likeliest topic of each row, and the probabilities of all."""
        topics = self.labels[probabilities.argmax(axis=1)].reshape(-1, 1)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("topic", topics), pb_utils.Tensor("probabilities", probabilities)]
        )
