"""Returns its version."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        version = np.array([self.version], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", version)]) for _ in requests]
