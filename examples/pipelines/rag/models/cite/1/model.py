"""Puts the source behind what was taken from it."""

from itertools import groupby

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        """Return the answer as one text; sentences in a row from one source share its mention."""
        sentences, cited = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("sentences", "cited")
        )
        parts = []
        for source, group in groupby(zip(sentences, cited, strict=True), key=lambda pair: pair[1]):
            parts += [sentence for sentence, _ in group]
            parts += [b"[" + source + b"]"] if source else []
        return pb_utils.InferenceResponse([pb_utils.Tensor("answer", np.array([b" ".join(parts)], dtype=object))])
