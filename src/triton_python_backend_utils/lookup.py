"""Finding a tensor, or what the configuration says of one, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_python_backend_utils.request import InferenceRequest
from triton_python_backend_utils.response import InferenceResponse
from triton_python_backend_utils.tensor import Tensor


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input called ``name``, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output called ``name``, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of the input called ``name``, or None."""
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of the output called ``name``, or None."""
    return _by_name(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return True if the configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _by_name(tensors: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
