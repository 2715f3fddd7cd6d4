"""Version 1: from 0 for the smallest to 1 for the largest number."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that the server looks for."""

    def execute(self, requests):
        """Answer a batch: one response for each request, in the same order."""
        return [pb_utils.InferenceResponse([pb_utils.Tensor("scaled", scaled(request))]) for request in requests]


def scaled(request):
    """Return the numbers of ``request`` between 0 and 1."""
    numbers = pb_utils.get_input_tensor_by_name(request, "numbers").as_numpy()
    span = np.ptp(numbers) if numbers.size else 0
    return (numbers - numbers.min()) / span if span else np.zeros_like(numbers)
