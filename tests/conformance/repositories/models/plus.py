"""Returns the sum of its inputs; without the second, the first plus a hundred."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "B")
        sum_ = first + (100 if second is None else second.as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sum_)])
