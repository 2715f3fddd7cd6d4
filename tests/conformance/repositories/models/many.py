"""A decoupled model: sends as its input says, a word for each response."""

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def numbered(number, name="X"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([number], np.int32))])


def failed(*told):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*told))


def refused(sender, *arguments, **flags):
    """Send, and return what that raises as a response."""
    try:
        sender.send(*arguments, **flags)
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
    return failed("not refused")


class TritonPythonModel:
    def execute(self, requests):
        returned = None
        for request in requests:
            sender = request.get_response_sender()
            for number, word in enumerate(request.inputs()[0].as_numpy()[0].decode().split()):
                if word == "send":
                    sender.send(numbered(number))
                elif word == "last":
                    sender.send(numbered(number), flags=FINAL)
                elif word == "end":
                    sender.send(flags=FINAL)
                elif word == "error":
                    sender.send(failed("went wrong"))
                elif word == "not-found":
                    sender.send(failed("not here", pb_utils.TritonError.NOT_FOUND), flags=FINAL)
                elif word == "none":
                    sender.send(refused(sender))
                elif word == "flags":
                    sender.send(refused(sender, numbered(0), flags=2))
                elif word == "other":
                    sender.send(numbered(number, "Y"))
                elif word == "after-end":
                    sender.send(flags=FINAL)
                    sender.send(numbered(0))
                elif word == "raise":
                    raise ValueError("gave up")
                elif word == "return":
                    returned = [numbered(number)]
                elif word == "return-empty":
                    returned = []
                elif word == "cancelled":
                    sender.send(failed(f"{sender.is_cancelled()} {request.is_cancelled()}"))
        return returned
