"""Execution providers: what a configuration calls accelerators, in ONNX Runtime's names and options. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.values import boolean, integer
from nerite.core.errors import InvalidArgument

Options: TypeAlias = tuple[tuple[str, str], ...]


class Provider(NamedTuple):
    """One execution provider and its options."""

    name: str
    options: Options = ()


CPU: Final = Provider("CPUExecutionProvider")

PACKAGES: Final[dict[str, str]] = {
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu (and TensorRT)",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
}
"""What to install, in place of ``onnxruntime``, for each provider that its usual package lacks."""

ONE_AT_A_TIME: Final = frozenset({"OpenVINOExecutionProvider"})
"""Providers that do not stand two sessions being made at once."""


def wanted(context: ModelContext, instance: InstanceContext) -> tuple[Provider, ...]:
    """Return the providers for an instance, most wanted first. Raises ``InvalidArgument`` for what we do not know."""
    accelerators = context.config.get("optimization", {}).get("execution_accelerators", {})
    providers: list[Provider] = []
    if instance.kind == "GPU":
        cuda: dict[str, str] = {}
        for accelerator in accelerators.get("gpu_execution_accelerator", ()):
            parameters = accelerator.get("parameters", {})
            if accelerator["name"] == "tensorrt":
                providers.append(_tensorrt(parameters, instance.device))
            elif accelerator["name"] == "cuda":
                cuda.update(parameters)
            else:
                raise _unknown(accelerator)
        providers.append(_cuda(context, cuda, instance.device))
    for accelerator in accelerators.get("cpu_execution_accelerator", ()):
        if accelerator["name"] != "openvino":
            raise _unknown(accelerator)
        options = {"device_type": "CPU", **accelerator.get("parameters", {})}
        providers.append(Provider("OpenVINOExecutionProvider", _frozen(options)))
    return (*providers, CPU)


def _unknown(accelerator: Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")


def _frozen(options: Mapping[str, str]) -> Options:
    return tuple((key, str(value)) for key, value in sorted(options.items()))


_PRECISIONS: Final[dict[str, dict[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "BF16": {"trt_bf16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}

_TENSORRT_NAMES: Final[dict[str, str]] = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""The parameters whose names differ. The others start with ``trt_`` and are checked by the provider itself."""


def _tensorrt(parameters: Mapping[str, str], device: int) -> Provider:
    options = {"device_id": str(device)}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
            options.update(_PRECISIONS[value])
        elif key in _TENSORRT_NAMES or key.startswith("trt_"):
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            raise InvalidArgument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return Provider("TensorrtExecutionProvider", _frozen(options))


def _choice(key: str, *names: str) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        index = integer(text)
        if not 0 <= index < len(names):
            raise InvalidArgument(f"unsupported {key} value '{index}' is requested")
        return names[index]

    return chosen


_CUDA_PARAMETERS: Final[dict[str, Callable[[str], str]]] = {
    "cudnn_conv_algo_search": _choice("cudnn_conv_algo_search", "EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": str,
    "arena_extend_strategy": _choice("arena_extend_strategy", "kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": lambda text: str(int(boolean(text))),
}
"""The old way to configure CUDA: as parameters of the model."""


def _cuda(context: ModelContext, options: Mapping[str, str], device: int) -> Provider:
    merged = dict(options)
    for key, read in _CUDA_PARAMETERS.items():
        if text := context.parameter(key):
            merged[key] = read(text)
    merged["device_id"] = str(device)
    return Provider("CUDAExecutionProvider", _frozen(merged))
