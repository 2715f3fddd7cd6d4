"""Misbehaves as its input says."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        kind = pb_utils.get_input_tensor_by_name(request, "KIND").as_numpy()[0].decode()
        if kind == "raise":
            raise ValueError("told to")
        if kind == "error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("told to", pb_utils.TritonError.UNAVAILABLE))
        if kind == "nothing":
            return pb_utils.InferenceResponse([])
        dtype = np.float32 if kind == "type" else np.int32
        shape = {"long": [3], "flat": [], "row": [1, 2], "rows": [2, 2]}.get(kind, [2])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(shape, dtype))])
