"""Tells what it is asked with."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        said = (
            request.request_id(),
            request.correlation_id(),
            request.flags(),
            request.timeout(),
            request.parameters(),
            sorted(request.requested_output_names()),
        )
        text = np.array([repr(said).encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)])
