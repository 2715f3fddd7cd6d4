"""Does what it is told to do wrong."""

import sys

import numpy as np

import triton_python_backend_utils as pb_utils

X = np.array([1, 2], np.int32)
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


def respond(kind):
    x, y = pb_utils.Tensor("X", X), pb_utils.Tensor("Y", X)
    if kind == "raise":
        raise ValueError("something broke")
    if kind == "raise unicode":
        raise ValueError('"quoted" \u00e9\t\\')
    if kind == "raise triton":
        raise pb_utils.TritonModelException("told so")
    if kind == "arguments of the process":
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(sys.argv)))
    if kind == "error":
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("no code"))
    if kind == "error empty":
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(""))
    if kind == "error and outputs":
        return pb_utils.InferenceResponse([x, y], error=pb_utils.TritonError("both"))
    if kind in CODES:
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError("code " + kind, getattr(pb_utils.TritonError, kind))
        )
    if kind == "no Y":
        return pb_utils.InferenceResponse([x])
    if kind == "no outputs":
        return pb_utils.InferenceResponse([])
    if kind == "extra output":
        return pb_utils.InferenceResponse([x, y, pb_utils.Tensor("Z", X)])
    if kind == "twice":
        return pb_utils.InferenceResponse([x, x, y])
    if kind == "other order":
        return pb_utils.InferenceResponse([y, x])
    if kind == "other type":
        return pb_utils.InferenceResponse([pb_utils.Tensor("X", X.astype(np.float64)), y])
    if kind == "other shape":
        return pb_utils.InferenceResponse([pb_utils.Tensor("X", X.reshape(1, 2, 1)), y])
    if kind == "empty tensor":
        return pb_utils.InferenceResponse([pb_utils.Tensor("X", X[:0]), y])
    if kind == "scalar tensor":
        return pb_utils.InferenceResponse([pb_utils.Tensor("X", np.array(7, np.int32)), y])
    if kind == "parameters":
        return pb_utils.InferenceResponse([x, y], parameters={"text": "t", "number": 3, "yes": True})
    if kind == "not a response":
        return "text"
    if kind == "none":
        return None
    return pb_utils.InferenceResponse([x, y])


class TritonPythonModel:
    def execute(self, requests):
        kinds = [request.inputs()[0].as_numpy()[0].decode() for request in requests]
        if kinds[0] == "too few":
            return []
        if kinds[0] == "too many":
            return [respond("fine"), respond("fine")]
        if kinds[0] == "not a list":
            return respond("fine")
        if kinds[0] == "nothing":
            return None
        return [respond(kind) for kind in kinds]
