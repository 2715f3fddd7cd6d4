"""Sleeps as long as it is told to, one request at a time, behind a short queue."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = request.inputs()[0].as_numpy()
            time.sleep(float(seconds.ravel()[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS_OUT", seconds)]))
        return responses
