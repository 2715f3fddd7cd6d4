"""Spells digits."""

import numpy as np

import triton_python_backend_utils as pb_utils

WORDS = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], dtype=object)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            digits = pb_utils.get_input_tensor_by_name(request, "digit").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("word", WORDS[digits])]))
        return responses
