"""Returns its input as several types, some of them with labels."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            scores = request.inputs()[0].as_numpy()
            tensors = [
                pb_utils.Tensor("SCORES", scores),
                pb_utils.Tensor("COUNTS", scores.astype(np.int32)),
                pb_utils.Tensor("TEXTS", scores.astype(str).astype(object)),
                pb_utils.Tensor("PLAIN", scores.astype(np.float64)),
                pb_utils.Tensor("HALF", scores.astype(np.float16)),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
