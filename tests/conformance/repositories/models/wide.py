"""Returns as many bytes as it is asked for, and how often it was asked."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.asked = 0

    def execute(self, requests):
        answers = []
        for request in requests:
            self.asked += 1
            size = pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy()[0]
            outputs = {"OUT": np.zeros(size, np.int8), "ASKED": np.array([self.asked], np.int32)}
            answers.append(
                pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
            )
        return answers
