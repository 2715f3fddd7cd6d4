"""Returns three scores whose classes have names."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = len(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
        scores = np.array([[0.25, 0.5, 0.125]] * rows, np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SCORES", scores)])
