"""Returns ten times its first input plus its second."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first, second = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", first * 10 + second)])
