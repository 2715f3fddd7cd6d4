"""Says what it got: shapes and values of its inputs, and the parameters of the request."""

import json

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            told = {tensor.name(): [list(tensor.as_numpy().shape), told_of(tensor)] for tensor in request.inputs()}
            parameters = json.loads(request.parameters()) if request.parameters() else {}
            said = json.dumps([told, parameters, request.request_id(), request.timeout()], sort_keys=True)
            words = np.array([said.split()[:3]], dtype=object)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("said", np.array([[said]], dtype=object)),
                        pb_utils.Tensor("words", words),
                        pb_utils.Tensor("count", np.array([[len(said)]], np.int32)),
                    ]
                )
            )
        return responses


def told_of(tensor):
    return [value.decode() if isinstance(value, bytes) else value for value in tensor.as_numpy().flatten().tolist()]
