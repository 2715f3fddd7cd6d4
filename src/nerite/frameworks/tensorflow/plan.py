"""Options of a session, derived from the configuration, and the types that describe a model. Pure, except for files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.configuration import (
    accelerators,
    batching,
    boolean_parameter,
    graph_level,
    instance_cores,
    integer_parameter,
    missing,
    model_dims,
    model_path,
    op_libraries,
    thread_count,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.config.mistake import nearest
from nerite.core import tensor as dtypes
from nerite.core.client_text import check_inside_directory
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.core.tensor import DataType

_log = logging.getLogger("nerite.frameworks.tensorflow")

SAVED_MODEL: Final = "tensorflow_savedmodel"
FROZEN_GRAPH: Final = "tensorflow_graphdef"
_FILE_NAMES: Final = {SAVED_MODEL: "model.savedmodel", FROZEN_GRAPH: "model.graphdef"}

_PARAMETERS: Final = (
    "MAX_SESSION_SHARE_COUNT",
    "TF_GRAPH_TAG",
    "TF_INIT_OPS_FILE",
    "TF_NUM_INTER_THREADS",
    "TF_NUM_INTRA_THREADS",
    "TF_SIGNATURE_DEF",
    "TF_USE_PER_SESSION_THREADS",
)
_JIT_LEVELS: Final = {-1: "OFF", 0: "DEFAULT", 1: "ON_1"}


@dataclass(frozen=True)
class TensorFlowPlan:
    """Everything that determines a session."""

    path: Path
    frozen: bool
    """True for a GraphDef, False for a SavedModel."""
    tags: tuple[str, ...]
    signature: str
    """Empty if the configuration does not set it."""
    init_operations: tuple[str, ...]
    op_libraries: tuple[str, ...]
    intra_op_threads: int
    inter_op_threads: int
    own_threads: bool
    """True if the session has its own threads, not those of the process."""
    jit_level: str
    """TensorFlow's name of XLA's level."""
    mixed_precision: bool
    soft_placement: bool
    kind: str
    device: int
    gpu_fraction: float
    """Share of the GPU's memory; 0 to allocate on demand."""


def make_plan(context: ModelContext, instance: InstanceContext) -> TensorFlowPlan:
    """Return the plan for an instance of a model.

    Raises ``Unavailable`` if the model file is missing and ``InvalidArgument`` for an invalid value.
    """
    own = instance_cores(context, instance)
    platform = str(context.config.get("platform") or SAVED_MODEL)
    if platform not in _FILE_NAMES:
        raise InvalidArgument(
            f"platform {platform} not supported for TensorFlow model '{context.name}'. Write one of: "
            f"{', '.join(_FILE_NAMES)}"
        )
    path = model_path(context, _FILE_NAMES[platform])
    if not path.exists():
        raise missing(context, path)
    return TensorFlowPlan(
        path=path,
        frozen=platform == FROZEN_GRAPH,
        tags=tuple(sorted(tag.strip() for tag in context.parameter("TF_GRAPH_TAG", "serve").split(","))),
        signature=context.parameter("TF_SIGNATURE_DEF"),
        init_operations=_init_operations(context),
        op_libraries=op_libraries(context),
        intra_op_threads=_count(context, "TF_NUM_INTRA_THREADS") or own,
        inter_op_threads=_count(context, "TF_NUM_INTER_THREADS") or own,
        own_threads=boolean_parameter(_truth(context.parameter("TF_USE_PER_SESSION_THREADS", "0"))),
        jit_level=_JIT_LEVELS.get(graph_level(context), "ON_2"),
        mixed_precision=_mixed_precision(context, instance),
        soft_placement=boolean_parameter(context.settings.get("allow-soft-placement", "1")),
        kind=instance.kind,
        device=instance.device,
        gpu_fraction=_fraction(context.settings.get("gpu-memory-fraction", "0")),
    )


def log_ignored_parameters(context: ModelContext) -> None:
    """Log which parameters have no effect. Raises ``InvalidArgument`` for an invalid value."""
    shared = context.parameter("MAX_SESSION_SHARE_COUNT")
    if shared and integer_parameter(shared) <= 0:
        raise InvalidArgument(
            f"parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model '{context.name}'"
        )
    if shared and integer_parameter(shared) > 1:
        _log.info(
            "'MAX_SESSION_SHARE_COUNT' of '%s' has no effect: each instance has a process, and a session, of its own",
            context.name,
        )
    for key in context.config.get("parameters", {}):
        if key.startswith("TF_") and key not in _PARAMETERS:
            meant = nearest(key, _PARAMETERS)
            _log.warning(
                "parameter '%s' of '%s' is not known here%s", key, context.name, f"; is it {meant}?" if meant else ""
            )


def _init_operations(context: ModelContext) -> tuple[str, ...]:
    name = context.parameter("TF_INIT_OPS_FILE")
    if not name:
        return ()
    check_inside_directory(name, f"'{name}', the TF_INIT_OPS_FILE of '{context.name}',", context.directory)
    for path in (context.version_directory / name, context.directory / name):
        if path.is_file():
            break
    else:
        raise Unavailable(
            f"unable to find '{name}', the TF_INIT_OPS_FILE of '{context.name}', in '{context.version_directory}' and "
            f"in '{context.directory}'"
        )
    try:
        operations = json.loads(path.read_text())["init_ops"]
        assert isinstance(operations, list) and all(isinstance(each, str) for each in operations)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise InvalidArgument(
            f"'{path}', the TF_INIT_OPS_FILE of '{context.name}', has to be JSON of the form "
            '{ "init_ops": ["operation", …] }'
        ) from None
    return tuple(operations)


def _count(context: ModelContext, key: str) -> int:
    count = thread_count(context, key)
    if count < 0:
        raise InvalidArgument(f"parameter '{key}' must be non-negative number for TensorFlow model '{context.name}'")
    return count


def _truth(text: str) -> str:
    # Triton's documentation has "yes" in its example.
    return {"yes": "true", "no": "false"}.get(text.lower(), text)


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise InvalidArgument(f"backend setting 'gpu-memory-fraction' is '{text}'; it may be a number from 0 to 1")
    return fraction


def _mixed_precision(context: ModelContext, instance: InstanceContext) -> bool:
    if accelerators(context, "cpu"):
        raise InvalidArgument("CPU Execution Accelerator is not supported in TensorFlow backend")
    wanted = accelerators(context, "gpu")
    if wanted and instance.kind != "GPU":
        _log.warning("GPU Execution Accelerator will be ignored for model instance on CPU")
        return False
    for accelerator in wanted:
        if accelerator["name"] == "tensorrt":
            raise InvalidArgument(
                "Execution Accelerator 'tensorrt' is requested: TensorFlow no longer has it. Export the model to ONNX "
                "and have ONNX Runtime use TensorRT, or leave it out"
            )
        if accelerator["name"] not in ("auto_mixed_precision", "gpu_io"):
            raise InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
    return any(accelerator["name"] == "auto_mixed_precision" for accelerator in wanted)


# Inputs and outputs of a model: under the names that clients use, and as tensors of its graph.

_DATATYPES: Final[dict[str, DataType]] = {
    "float32": dtypes.FP32,
    "float64": dtypes.FP64,
    "int32": dtypes.INT32,
    "uint8": dtypes.UINT8,
    "int16": dtypes.INT16,
    "int8": dtypes.INT8,
    "string": dtypes.BYTES,
    "int64": dtypes.INT64,
    "bool": dtypes.BOOL,
    "bfloat16": dtypes.BF16,
    "uint16": dtypes.UINT16,
    "float16": dtypes.FP16,
    "uint32": dtypes.UINT32,
    "uint64": dtypes.UINT64,
}
"""Data types of the protocol, by TensorFlow's names."""


class TensorFlowSignature(NamedTuple):
    """Inputs and outputs of a model, and their names in its graph (``name:0``)."""

    graph: ModelGraph
    feeds: Mapping[str, str]
    fetches: Mapping[str, str]


class DescribedTensor(NamedTuple):
    """Tensor as the model describes it. ``dims`` is None if the number of dimensions is unknown."""

    name: str
    datatype: str
    dims: tuple[int, ...] | None


def signature_tensors(
    model: str, described: Mapping[str, DescribedTensor], config: Mapping[str, Any], side: str
) -> dict[str, GraphTensor]:
    """Return the inputs or outputs of a model; ``side`` is ``input`` or ``output``.

    Unknown numbers of dimensions are taken from ``config``. Raises ``NeriteError`` if that does not declare them
    either, and for types that the protocol lacks.
    """
    declared = {entry["name"]: entry for entry in config.get(side, ())}
    batch = (-1,) if batching(config) else ()
    found = {}
    for name, tensor in described.items():
        datatype = _DATATYPES.get(tensor.datatype)
        if datatype is None:
            raise Unsupported(
                f"unable to process {side} '{name}' for '{model}', unsupported datatype '{tensor.datatype}'. The "
                f"protocol has: {', '.join(_DATATYPES)}; export the model with a signature of those"
            )
        dims = tensor.dims
        if dims is None:
            dims = (*batch, *model_dims(declared.get(name, {})))
            if dims == batch:
                raise InvalidArgument(
                    f"unable to autofill for '{model}': the rank of model tensor '{name}' is 0 and dimensions are not "
                    f"defined. The model does not say how many dimensions '{name}' has: write dims for it"
                )
        found[name] = GraphTensor(name, datatype, dims)
    return found
