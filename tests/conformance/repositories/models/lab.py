"""Does what the request says, which is Python, and answers with what that has said."""

import numpy as np

import triton_python_backend_utils as pb_utils


def ask(model="echo", value=(1.0, 2.0), name="IN", outputs=("OUT",), **more):
    tensor = pb_utils.Tensor(name, np.array(value, np.float32))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=[tensor], **more)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        said = []

        def say(*what):
            said.append(" ".join(map(str, what)))

        def tell(response):
            if response.has_error():
                say("error:", response.error().message())
            else:
                say([(tensor.name(), tensor.as_numpy().tolist()) for tensor in response.output_tensors()])

        known = {"ask": ask, "say": say, "tell": tell, "pb_utils": pb_utils, "np": np, "request": request}
        try:
            exec(request.inputs()[0].as_numpy()[0].decode(), known)
        except (pb_utils.TritonModelException, TypeError, RuntimeError, StopIteration) as error:
            say(type(error).__name__, str(error).partition("Invoked with")[0])
        text = np.array(["\n".join(said).encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", text)])
