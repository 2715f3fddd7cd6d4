"""Has no memory left for a request whose first number is negative."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, values):
        if values[0][0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("CUDA out of memory"))
        if values[0][0] == 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("division by zero"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)])
