"""Picks one of two answers, and says whether they agree: what a comparison of two versions is made for."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            version, first, second = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in ("version", "digit_of_1", "digit_of_2")
            )
            chosen = pb_utils.Tensor("digit", np.where(version == 2, second, first))
            responses.append(pb_utils.InferenceResponse([chosen, pb_utils.Tensor("agreed", first == second)]))
        return responses
