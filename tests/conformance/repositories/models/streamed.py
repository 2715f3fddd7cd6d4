"""A model whose requests run as often as their input has words; each says what becomes of a turn."""

import json

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def told(request):
    """What a model can know of its sequence, as text."""
    controls = {
        tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs() if tensor.name() != "WORDS"
    }
    return f"{sorted(controls.items())} {request.flags()} {request.correlation_id()!r} {request.request_id()}"


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.turns = {}

    def execute(self, requests):
        returned = [self.turn(request) for request in requests]
        return None if self.decoupled else returned

    def turn(self, request):
        seen = self.turns.setdefault(request.correlation_id(), [])
        seen.append(told(request))
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy().reshape(-1)[0].decode().split()
        word = words[len(seen) - 1]
        if len(seen) == len(words):
            del self.turns[request.correlation_id()]
        response = pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([["\n".join(seen)]], object))])
        if word == "raise":
            raise ValueError("gave up")
        if word == "error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("went wrong"))
        if self.decoupled:
            request.get_response_sender().send(response, FINAL if word == "last" else 0)
        elif word == "sender":
            request.get_response_sender().send(response, FINAL)
            return None
        if word in ("again", "both"):
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        elif word.isdigit():
            request.set_release_flags(int(word))
        return None if word == "again" or word.isdigit() else response
