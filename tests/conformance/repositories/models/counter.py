"""Sends as many responses as it is asked for; 4 come with the last of them, 3 with an error."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(request.inputs()[0].as_numpy()[0])
            for number in range(count):
                last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if count == 4 and number == 3 else 0
                value = np.array([number], np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]), flags=last)
            if count == 3:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("three")))
            if count != 4:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
