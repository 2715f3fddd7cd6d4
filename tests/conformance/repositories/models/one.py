"""A model that is not decoupled, and answers by its sender, or by returning, or both."""

import time

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def numbered(number):
    return pb_utils.InferenceResponse([pb_utils.Tensor("X", np.array([number], np.int32))])


class TritonPythonModel:
    def execute(self, requests):
        returned = []
        nothing = False
        for request in requests:
            response = None
            for number, word in enumerate(request.inputs()[0].as_numpy()[0].decode().split()):
                if word == "sleep":
                    time.sleep(0.5)
                elif word == "return":
                    response = numbered(number)
                elif word == "send":
                    request.get_response_sender().send(numbered(number))
                elif word == "last":
                    request.get_response_sender().send(numbered(number), flags=FINAL)
                elif word == "end":
                    request.get_response_sender().send(flags=FINAL)
                elif word == "error":
                    error = pb_utils.TritonError("went wrong")
                    response = pb_utils.InferenceResponse(error=error)
                elif word == "nothing":
                    nothing = True
                elif word == "raise":
                    raise ValueError("gave up")
            returned.append(response)
        return None if nothing else returned
