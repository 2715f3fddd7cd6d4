"""Answers with what its samples were: the inputs by name, in the order of their names."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.samples = []

    def execute(self, requests):
        inputs = [{tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()} for request in requests]
        self.samples += [str(sorted(each.items())) for each in inputs]
        told = np.array([self.samples[:2]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAMPLES", told)]) for _ in requests]
