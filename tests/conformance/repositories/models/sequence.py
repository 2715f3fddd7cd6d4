"""Adds up what a sequence sends, and says what it was told of the sequence."""

import json
import time

import numpy as np

import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "END", "READY", "CORRID")


def controls(request):
    tensors = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in CONTROLS)
    told = {name: tensor.as_numpy() for name, tensor in tensors if tensor is not None}
    return " ".join(f"{name}={array.dtype.name}{array.tolist()}" for name, array in told.items())


def number(request, name):
    return float(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0])


class TritonPythonModel:
    def initialize(self, args):
        self.rows = int(json.loads(args["model_config"])["max_batch_size"]) > 0
        self.sums = {}

    def execute(self, requests):
        # A request without a correlation id stands for a slot without a request: its inputs say nothing.
        batch = [request.correlation_id() for request in requests]
        responses = []
        for request, of in zip(requests, batch, strict=True):
            if not of:
                responses.append(pb_utils.InferenceResponse([]))
                continue
            time.sleep(number(request, "SECONDS"))
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[of] = 0.0
            self.sums[of] = self.sums.get(of, 0.0) + number(request, "VALUE")
            said = f"{controls(request)} flags={request.flags()} id={of!r} sum={self.sums[of]} of {batch}"
            shape = (1, 1) if self.rows else (1,)
            text = np.array([said.encode()], object).reshape(shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", text)]))
        return responses
