"""A/B in code: asks one version of ``digits``, the one that the router names. If version 2 fails, version 1 answers."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        """Return the answer of one of the two versions, and which it was."""
        user = pb_utils.get_input_tensor_by_name(request, "user").as_numpy()
        pixels = pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy()
        # The two models have a batch dimension, and this one has none.
        routed = ask("router", -1, pb_utils.Tensor("user", user[None]), "version")
        version = pb_utils.get_output_tensor_by_name(routed, "version").as_numpy()[0]
        answer = ask("digits", int(version[0]), pb_utils.Tensor("pixels", pixels[None]), "digit")
        if answer.has_error() and version[0] == 2:
            pb_utils.Logger.log_warn(f"version 2 of digits failed, 1 answers: {answer.error().message()}")
            version[0] = 1
            answer = ask("digits", 1, pb_utils.Tensor("pixels", pixels[None]), "digit")
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        digit = pb_utils.get_output_tensor_by_name(answer, "digit").as_numpy()[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("digit", digit), pb_utils.Tensor("version", version)])


def ask(model, version, tensor, output):
    """Return the response of a model to one tensor."""
    return pb_utils.InferenceRequest(
        model_name=model, model_version=version, inputs=[tensor], requested_output_names=[output]
    ).exec()
