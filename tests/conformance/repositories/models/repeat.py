"""Counts to its input: one response for each number. Fails at 4. Says that it is done when all have arrived."""

import time

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
            for number in range(count):
                if number == 4:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("four is too many")))
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            time.sleep(0.4)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
