"""Describes the request that it got."""

import json

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "outputs": sorted(request.requested_output_names()),
                "parameters": json.loads(request.parameters() or "{}"),
            }
            text = json.dumps(seen, sort_keys=True)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("REQUEST", np.array([text], object))]))
        return responses
