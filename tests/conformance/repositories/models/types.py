"""Returns every input it is given, whatever its type."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT_" + tensor.name()[3:], tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
