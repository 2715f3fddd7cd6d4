"""Says which version it is."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("VERSION", np.full_like(request.inputs()[0].as_numpy(), self.version))]
            )
            for request in requests
        ]
