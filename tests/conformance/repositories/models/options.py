"""Says which inputs came."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            names = sorted(tensor.name() for tensor in request.inputs())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("NAMES", np.array(names, object))]))
        return responses
