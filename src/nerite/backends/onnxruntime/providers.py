"""Execution providers: what a configuration calls accelerators, in ONNX Runtime's names and options. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.values import boolean, integer, parameter, placed
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
                providers.append(_tensorrt(context, parameters, instance.device))
            elif accelerator["name"] == "cuda":
                cuda.update(parameters)
            else:
                raise _unknown(context, accelerator, "gpu", "cuda or tensorrt")
        providers.append(_cuda(context, cuda, instance.device))
    for accelerator in accelerators.get("cpu_execution_accelerator", ()):
        if accelerator["name"] != "openvino":
            raise _unknown(context, accelerator, "cpu", "openvino")
        options = {"device_type": "CPU", **accelerator.get("parameters", {})}
        providers.append(Provider("OpenVINOExecutionProvider", _frozen(options)))
    return (*providers, CPU)


def _unknown(context: ModelContext, accelerator: Mapping[str, Any], kind: str, known: str) -> InvalidArgument:
    return InvalidArgument(
        f"unknown Execution Accelerator '{accelerator['name']}' is requested, as {kind}_execution_accelerator of model "
        f"'{context.name}', which may be {known}"
    )


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


def _tensorrt(context: ModelContext, parameters: Mapping[str, str], device: int) -> Provider:
    options = {"device_id": str(device)}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                error = InvalidArgument(f"unsupported precision mode '{value}' is requested")
                raise placed(error, context, key, ", ".join(_PRECISIONS), "tensorrt")
            options.update(_PRECISIONS[value])
        elif key in _TENSORRT_NAMES or key.startswith("trt_"):
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            raise InvalidArgument(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator of model '{context.name}', "
                f"which has precision_mode, {', '.join(_TENSORRT_NAMES)}, and those that begin with trt_"
            )
    return Provider("TensorrtExecutionProvider", _frozen(options))


def _choice(key: str, *names: str) -> _CudaParameter:
    def chosen(text: str) -> str:
        index = integer(text)
        if not 0 <= index < len(names):
            raise InvalidArgument(f"unsupported {key} value '{index}' is requested")
        return names[index]

    return _CudaParameter(chosen, ", ".join(f"{index} ({name})" for index, name in enumerate(names)))


def _bytes(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(f"failed to convert '{text}' to integral number")
    return text


class _CudaParameter(NamedTuple):
    read: Callable[[str], str]
    expected: str


_CUDA_PARAMETERS: Final[dict[str, _CudaParameter]] = {
    "cudnn_conv_algo_search": _choice("cudnn_conv_algo_search", "EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": _CudaParameter(_bytes, "a number of bytes"),
    "arena_extend_strategy": _choice("arena_extend_strategy", "kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": _CudaParameter(lambda text: str(int(boolean(text))), "true or false"),
}
"""The old way to configure CUDA: as parameters of the model."""


def _cuda(context: ModelContext, options: Mapping[str, str], device: int) -> Provider:
    merged = dict(options)
    for key, known in _CUDA_PARAMETERS.items():
        if context.parameter(key):
            merged[key] = parameter(context, key, "", known.read, known.expected)
    merged["device_id"] = str(device)
    return Provider("CUDAExecutionProvider", _frozen(merged))
