"""Returns both inputs. Has a batch dimension; B's rows have a length of the caller's choice."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(tensor.name() + "_OUT", tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
