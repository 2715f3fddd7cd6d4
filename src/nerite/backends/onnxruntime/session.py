"""Plans of ONNX Runtime sessions, derived from the configuration, and the import of the framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.backends import configuration, machine
from nerite.backends.configuration import (
    accelerators,
    boolean_parameter,
    flag,
    graph_level,
    instance_cores,
    integer_parameter,
    op_libraries,
    parameter,
    placed,
    setting,
    thread_count,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import importing, without_telemetry
from nerite.core.errors import InvalidArgument
from nerite.devices import cuda


@cache
def onnxruntime() -> ModuleType:
    """Import ONNX Runtime lazily and return it. Raises ``Unsupported`` if it cannot be imported."""
    with importing("onnxruntime", "onnx"), without_telemetry():
        import onnxruntime
    return onnxruntime  # type: ignore[no-any-return]  # The package has no types.


@cache
def load_cuda_libraries() -> None:
    """Load the libraries of CUDA that pip installed, once: ONNX Runtime itself looks for those of the system alone."""
    if hasattr(onnxruntime(), "preload_dlls"):  # since 1.21
        onnxruntime().preload_dlls()


# Execution providers: the accelerators of a configuration, translated to ONNX Runtime's names and options. Pure.

Options: TypeAlias = tuple[tuple[str, str], ...]


class Provider(NamedTuple):
    """Execution provider with its options."""

    name: str
    options: Options = ()


CPU: Final = Provider("CPUExecutionProvider")

CUDA: Final = "CUDAExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"

ONE_AT_A_TIME: Final = frozenset({OPENVINO})
"""Providers for which sessions must not be opened concurrently."""


def wanted_providers(context: ModelContext, instance: InstanceContext) -> tuple[Provider, ...]:
    """Return the providers for an instance, preferred first. Raises ``InvalidArgument`` for unknown accelerators."""
    providers: list[Provider] = []
    if instance.kind == "GPU":
        cuda_options: dict[str, str] = {}
        for accelerator in accelerators(context, "gpu"):
            parameters = accelerator.get("parameters", {})
            if accelerator["name"] == "tensorrt":
                providers.append(_tensorrt(context, parameters, instance.device))
            elif accelerator["name"] == "cuda":
                cuda_options.update(parameters)
            else:
                raise _unknown(context, accelerator, "gpu", "cuda or tensorrt")
        if cuda.FRAMEWORK_DEVICE == "cuda":  # otherwise a build for processors stands for it
            providers.append(_cuda(context, cuda_options, instance.device))
    for accelerator in accelerators(context, "cpu"):
        if accelerator["name"] != "openvino":
            raise _unknown(context, accelerator, "cpu", "openvino")
        options = {"device_type": "CPU", **accelerator.get("parameters", {})}
        providers.append(Provider(OPENVINO, _frozen(options)))
    return (*providers, CPU)


def _unknown(context: ModelContext, accelerator: Mapping[str, Any], kind: str, known: str) -> InvalidArgument:
    return InvalidArgument(
        f"unknown Execution Accelerator '{accelerator['name']}' is requested as {kind}_execution_accelerator of model "
        f"'{context.name}'; use {known}"
    )


def _frozen(options: Mapping[str, str]) -> Options:
    return tuple((key, str(value)) for key, value in sorted(options.items()))


_PRECISIONS: Final[dict[str, dict[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "BF16": {"trt_bf16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}

_GRAPHS: Final = "trt_cuda_graph_enable"
_TENSORRT_NAMES: Final[dict[str, str]] = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""Parameters whose names differ. The others start with ``trt_`` and are checked by the provider itself."""


def _tensorrt(context: ModelContext, parameters: Mapping[str, str], device: int) -> Provider:
    options = {"device_id": str(device)}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                error = InvalidArgument(f"unsupported precision mode '{value}' is requested")
                raise placed(error, context, key, ", ".join(_PRECISIONS), "tensorrt")
            options.update(_PRECISIONS[value])
        elif key == _GRAPHS and boolean_parameter(value):
            error = InvalidArgument("a CUDA graph reads its inputs at fixed addresses, and those of requests differ")
            raise placed(error, context, key, "false; models of the backend tensorrt can use graphs", "tensorrt")
        elif key in _TENSORRT_NAMES or key.startswith("trt_"):
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            raise InvalidArgument(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator of model '{context.name}', "
                f"which accepts precision_mode, {', '.join(_TENSORRT_NAMES)}, and parameters that begin with trt_"
            )
    return Provider(TENSORRT, _frozen(options))


def _choice(key: str, *names: str) -> _CudaParameter:
    def chosen(text: str) -> str:
        index = integer_parameter(text)
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
    "do_copy_in_default_stream": _CudaParameter(lambda text: str(int(boolean_parameter(text))), "true or false"),
}
"""Deprecated way to configure CUDA: parameters of the model."""


def _cuda(context: ModelContext, options: Mapping[str, str], device: int) -> Provider:
    merged = dict(options)
    for key, known in _CUDA_PARAMETERS.items():
        if context.parameter(key):
            merged[key] = parameter(context, key, "", known.read, known.expected)
    merged["device_id"] = str(device)
    return Provider(CUDA, _frozen(merged))


# Session plans, derived from the configuration. Pure, except for the status of the model file.
#
# Threads: by default ONNX Runtime gives every session as many threads as the machine has cores, and they spin while
# idle. That suits a program that does nothing else, but a server has several instances, an event loop and worker
# processes on the same cores. Measured on two cores: a small convolutional network with two instances answered 1.5 to
# 2.3 times as many requests with one thread per instance; and with other load on the machine a batch of 32 took three
# times as long with spinning threads as with sleeping ones. So the usable cores are divided among the instances of a
# model, and threads do not spin, unless the configuration says otherwise.

_DEFAULT_CPU_INSTANCES: Final = 2
"""Number of CPU instances of a configuration without instance groups."""

DEFAULT_ENTRIES: Final[dict[str, str]] = {
    "session.inter_op.allow_spinning": "0",
    "session.intra_op.allow_spinning": "0",
}
"""Default session configuration entries, which a model's parameters may override."""

_SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"
_ARENA: Final = re.compile(r"(cpu|gpu):\d+")

_GRAPH_LEVELS: Final[dict[int, str]] = {
    -1: "ORT_ENABLE_BASIC",
    1: "ORT_ENABLE_EXTENDED",
    2: "ORT_DISABLE_ALL",
}
"""``optimization.graph.level`` in ONNX Runtime's names; any other value means all optimizations."""


class ModelFile(NamedTuple):
    """Model file, with its modification time, so that plans for an older file differ."""

    path: Path
    modified_ns: int


@dataclass(frozen=True)
class OnnxSessionPlan:
    """Everything that determines a session. Sessions with equal plans are interchangeable."""

    file: ModelFile
    providers: tuple[Provider, ...]
    graph_level: str
    parallel: bool
    intra_op_threads: int
    inter_op_threads: int
    global_threads: bool
    """True if all sessions share one thread pool of the sizes above."""
    memory_arena: bool
    memory_pattern: bool
    entries: tuple[tuple[str, str], ...]
    """Session configuration entries, passed on unchanged."""
    op_libraries: tuple[str, ...]
    cores: tuple[int, ...] = ()
    """The cores that its threads run on; empty for any."""


def make_plan(context: ModelContext, instance: InstanceContext, file: ModelFile) -> OnnxSessionPlan:
    """Return the plan for an instance of a model. Raises ``InvalidArgument`` for an invalid value."""
    global_threads = setting(context, "enable-global-threadpool", "0", boolean_parameter, "true or false")
    own = machine.usable_cores() if global_threads else instance_cores(context, instance, _DEFAULT_CPU_INSTANCES)

    def threads(key: str) -> int:
        """Return a pool's size: the model's setting, the backend's setting, or the instance's share of the cores."""
        count = 0 if global_threads else thread_count(context, key)
        count = count or setting(context, key, "0", integer_parameter, "a number of threads, or 0")
        return count if count > 0 else own

    return OnnxSessionPlan(
        file=file,
        providers=wanted_providers(context, instance),
        graph_level=_GRAPH_LEVELS.get(graph_level(context), "ORT_ENABLE_ALL"),
        parallel=parameter(context, "execution_mode", "0", _is_parallel, "0 or 1"),
        intra_op_threads=threads("intra_op_thread_count"),
        inter_op_threads=threads("inter_op_thread_count"),
        global_threads=global_threads,
        memory_arena=_memory_arena(context),
        memory_pattern=flag(context, "enable_mem_pattern", default=True),
        entries=tuple(sorted({**DEFAULT_ENTRIES, **_entries(context.config)}.items())),
        op_libraries=op_libraries(context),
        cores=instance.cores,
    )


def run_entries(context: ModelContext) -> Mapping[str, str]:
    """Return the configuration entries for each run. Raises ``InvalidArgument`` if they would fail every run."""
    if not context.parameter(_SHRINKAGE):
        return {}
    groups = context.config.get("instance_group", ())
    arenas = {f"gpu:{gpu}" for group in groups for gpu in group.get("gpus", ())}
    if _memory_arena(context):
        arenas.add("cpu:0")

    def checked(text: str) -> str:
        names = [name if ":" in name else f"{name}:0" for name in text.removesuffix(";").split(";")]
        # ONNX Runtime itself validates only the first one.
        if names[0] not in arenas or not all(map(_ARENA.fullmatch, names)):
            raise InvalidArgument(f"'{text}' names an arena that does not exist")
        return text

    expected = "cpu:0 (with 'enable_mem_arena') and gpu:N of the model's GPUs, separated by ';'"
    return {_SHRINKAGE: parameter(context, _SHRINKAGE, "", checked, expected)}


def model_file(context: ModelContext) -> ModelFile:
    """Return the model file: the configured one, or ``model.onnx`` in a directory of that name.

    Raises ``Unavailable`` if it is missing.
    """
    path = configuration.model_path(context, "model.onnx")
    if path.is_dir():
        path /= "model.onnx"
    if not path.is_file():
        raise configuration.missing(context, path)
    return ModelFile(path, path.stat().st_mtime_ns)


def _memory_arena(context: ModelContext) -> bool:
    return flag(context, "enable_mem_arena", default=True)


def _is_parallel(text: str) -> bool:
    mode = integer_parameter(text)
    if mode not in (0, 1):
        raise InvalidArgument(
            f"Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got {mode} ."
        )
    return mode == 1


def _entries(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that are session configuration entries of ONNX Runtime."""
    parameters = config.get("parameters", {})
    return {key: str(value["string_value"]) for key, value in parameters.items() if key.startswith("session.")}
