"""Answers as often as it is asked to: a decoupled model."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(int(request.inputs()[0].as_numpy()[0])):
                tensor = pb_utils.Tensor("INDEX", np.array([index], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
