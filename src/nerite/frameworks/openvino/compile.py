"""How a model is read, adapted and compiled, derived from its configuration.

Threads: unless the configuration says otherwise, a model for the CPU is compiled once for all its instances, with a
stream for each; the streams divide the cores that the process may use. By default OpenVINO would use all cores of the
machine and pin its threads: each model to the same cores, so that two models share some while others are idle.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.backends import machine
from nerite.backends.configuration import batching, model_path
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import translating
from nerite.config.mistake import nearest
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable
from nerite.frameworks.openvino import graph
from nerite.frameworks.openvino.graph import OpenVinoPort

# Parameters of the configuration that are properties of OpenVINO. Pure.
#
# Triton's names come first; they are OpenVINO's own except for ``HINT_BF16``. Any other property of the device is set
# under its own name, with a value in OpenVINO's format. Other parameters, unless misspelt, are not for OpenVINO.

_log = logging.getLogger("nerite.frameworks.openvino")

OWN: Final = (
    "CPU_EXTENSION_PATH",
    "ENABLE_BATCH_PADDING",
    "ENABLE_MMAP",
    "RESHAPE_IO_LAYERS",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "TARGET_DEVICE",
)
"""Parameters that control how a model is read and prepared; not properties of a device."""

ANY_DEVICE: Final = ("ALLOW_AUTO_BATCHING", "AUTO_BATCH_TIMEOUT", "CACHE_DIR", "CACHE_MODE")
"""Properties that every device accepts and few list."""

PRECISION: Final = "INFERENCE_PRECISION_HINT"
"""Property for the precision that a device computes with."""
_SERVER: Final = ("EXECUTION_MODE",)
"""Parameters of the server whose names resemble those of properties."""

_SIMILARITY: Final = 0.8
"""Similarity from which on an unknown parameter counts as a misspelt known one."""


class _Property(NamedTuple):
    """Property of OpenVINO that one of Triton's parameters sets."""

    name: str
    values: str
    """Regular expression of the accepted values, in capitals."""
    expected: str
    """The accepted values, for the error."""


_HINTS: Final = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
_PROPERTIES: Final[Mapping[str, _Property]] = {
    "INFERENCE_NUM_THREADS": _Property("INFERENCE_NUM_THREADS", r"\d+", "a non-negative number"),
    "COMPILATION_NUM_THREADS": _Property("COMPILATION_NUM_THREADS", r"\d+", "a non-negative number"),
    "HINT_BF16": _Property(PRECISION, "YES", "YES"),
    "NUM_STREAMS": _Property("NUM_STREAMS", r"\d+|AUTO|NUMA", "either AUTO/NUMA/<int_value>"),
    "PERFORMANCE_HINT": _Property("PERFORMANCE_HINT", "|".join(_HINTS), "/".join(_HINTS)),
}
"""By Triton's parameter."""


def chosen_properties(context: ModelContext, device: Collection[str]) -> dict[str, str]:
    """Return the properties that the configuration sets, by OpenVINO's names; ``device`` lists those of the device.

    Raises ``InvalidArgument`` for an invalid value and for a misspelt name.
    """
    found = {}
    known = {*_PROPERTIES, *OWN, *ANY_DEVICE, *device}
    for key in context.config.get("parameters", {}):
        value = context.parameter(key)
        if key in _PROPERTIES:
            name, values, expected = _PROPERTIES[key]
            if not re.fullmatch(values, value.upper()):
                raise InvalidArgument(f"expected the parameter '{key}' to be {expected}, got {value}")
            if name in device:
                found[name] = "bf16" if key == "HINT_BF16" else value.upper()
            else:
                _log.warning("model '%s': its device has no property %s, '%s' says nothing", context.name, name, key)
        elif key in (*ANY_DEVICE, *device):
            found[key] = value
        elif key not in (*OWN, *_SERVER) and (meant := nearest(key.upper(), sorted(known), _SIMILARITY)):
            raise InvalidArgument(
                f"the parameter '{key}' is not yet supported by openvino backend. Did you mean {meant}?"
            )
    if cache := context.settings.get("cache-dir"):
        found.setdefault("CACHE_DIR", cache)
    return found


def flag_property(context: ModelContext, key: str, default: str = "NO") -> bool:
    """Return True if a parameter is YES, False if it is NO. Raises ``InvalidArgument`` for anything else."""
    value = (context.parameter(key) or default).upper()
    if value not in ("YES", "NO"):
        raise InvalidArgument(f"expected the parameter '{key}' to be YES or NO, got {context.parameter(key)}")
    return value == "YES"


OTHER_FILES: Final = ("model.onnx", "model.tflite", "model.pdmodel", "model.savedmodel", "model.pb")
"""Alternative names of a model file in the error for a missing ``model.xml``."""


@dataclass(frozen=True)
class ModelSource:
    """Model file, and how it is read. Equal sources are the same model."""

    path: Path
    modified_ns: tuple[int, ...]
    """Modification times of the file and of the weights beside it."""
    extension: str
    """Library of custom operators; empty for none."""
    map_weights: bool
    """True to map the file with the weights instead of reading it."""


@dataclass(frozen=True)
class CompilePlan:
    """Everything that determines a compiled model, besides its source and its configuration."""

    device: str
    properties: tuple[tuple[str, str], ...]
    cores: tuple[int, ...] = ()
    """The cores that its threads run on; empty for any."""


def model_source(context: ModelContext) -> ModelSource:
    """Return what is to be read. Raises ``Unavailable`` if there is no such file."""
    path = _model_path(context)
    files = [path, *(beside for beside in [path.with_suffix(".bin")] if beside.is_file())]
    return ModelSource(
        path,
        tuple(file.stat().st_mtime_ns for file in files),
        context.parameter("CPU_EXTENSION_PATH"),
        flag_property(context, "ENABLE_MMAP", "YES"),
    )


def plan_device(context: ModelContext) -> str:
    """Return OpenVINO's name of the device that a model is compiled for."""
    return context.parameter("TARGET_DEVICE", "CPU").upper()


def make_plan(context: ModelContext, supported: Collection[str]) -> CompilePlan:
    """Return the plan of a model; ``supported`` lists the properties of the device. Raises ``InvalidArgument``."""
    return CompilePlan(plan_device(context), tuple(sorted(chosen_properties(context, supported).items())))


def instance_plan(plan: CompilePlan, name: str, instance: InstanceContext) -> CompilePlan:
    """Adapt the plan of model ``name`` to one of its instances: cores and thread counts.

    Raises ``InvalidArgument`` for an instance that is not on the CPU: ``TARGET_DEVICE`` selects other devices.
    """
    if instance.kind != "CPU":
        raise InvalidArgument(
            f"unable to load model '{name}', Triton OpenVINO backend supports only Kind CPU and AUTO. Set kind: "
            "KIND_CPU, and the parameter TARGET_DEVICE to the device"
        )
    if plan.device != "CPU":
        return plan
    cores = len(instance.cores) or machine.usable_cores()
    configured = dict(plan.properties)
    own = {"INFERENCE_NUM_THREADS": str(cores), "ENABLE_CPU_PINNING": "NO"}
    if "PERFORMANCE_HINT" not in configured:
        own["NUM_STREAMS"] = str(min(instance.sharing, cores))
    return replace(plan, properties=tuple(sorted({**own, **configured}.items())), cores=instance.cores)


def _model_path(context: ModelContext) -> Path:
    path = model_path(context, "model.xml")
    if not path.exists():
        raise Unavailable(
            f"unable to find '{path}' for model '{context.name}'. It may also be {', '.join(OTHER_FILES)}; "
            "default_model_filename may name another"
        )
    return path


# Reading a model file.

_HEAD: Final = 4096
"""Bytes of a file to look at."""

_REMEDIES: Final = (
    ("Empty weights data", "The weights lie in a file of their own: copy '{weights}', too"),
    ("weights in bin file", "'{weights}' is cut off, or of another model: copy both files once more"),
    ("ONNX operations", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("No conversion rule", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("doesn't contain the operation", "Install a newer OpenVINO, or name a library that has it: CPU_EXTENSION_PATH"),
    ("", "Is '{path}' complete? Copy or export it again"),
)
"""Remedies, by a part of OpenVINO's message."""


def read_model(source: ModelSource) -> Any:
    """Return an ``openvino.Model``. Raises ``NeriteError`` with what is wrong with the file, and the remedy."""
    path = source.path
    _check_head(path)
    core = graph.core(source.extension)

    def refused(error: Exception) -> NeriteError:
        remedy = next(remedy for part, remedy in _REMEDIES if part in str(error))
        remedy = remedy.format(path=path, weights=path.with_suffix(".bin"))
        return graph.translated(error, "reading model", remedy)

    with translating(refused):
        if source.map_weights:
            return core.read_model(str(path))
        return core.read_model(str(path), config={"ENABLE_MMAP": "NO"})


def _check_head(path: Path) -> None:
    """Reject a file that is obviously no model: OpenVINO would try all its readers on it, and they are noisy."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD)
    prefix = "openvino error in reading model : "
    if not head:
        raise Internal(f"{prefix}'{path}' is empty: copy it once more")
    if path.suffix == ".xml" and b"<net" not in head:
        raise Internal(f"{prefix}'{path}' is no OpenVINO IR: export the model with openvino.save_model")
    if path.suffix == ".tflite" and head[4:8] != b"TFL3":
        raise Internal(f"{prefix}'{path}' is no TFLite model: export it once more")


# Adapting a model to its configuration as far as OpenVINO can: shapes, the batch dimension, element types.

_ELEMENTS: Final = {datatype.config_name: element for element, datatype in graph.DATATYPES.items()}


def fit_model(model: Any, context: ModelContext, config: Mapping[str, Any]) -> None:
    """Adapt ``model`` to ``config``. Idempotent. Raises ``NeriteError`` if the model cannot be changed in this way.

    - ``max_batch_size``: the first dimension becomes free;
    - ``RESHAPE_IO_LAYERS``: inputs get the declared shapes;
    - ``data_type``: numbers of another type are converted.
    """
    inputs = graph.inputs(model, config)
    reshaping = flag_property(context, "RESHAPE_IO_LAYERS")
    shapes = {}
    for socket in inputs:
        wanted = socket.dims
        if socket.entry is not None and (reshaping or wanted is None):
            wanted = graph.declared_dims(socket.entry, config)
        elif wanted and batching(config):
            wanted = (-1, *wanted[1:])
        if wanted is not None and wanted != socket.dims:
            shapes[socket.position] = wanted
    _reshape(model, shapes, "Leave RESHAPE_IO_LAYERS out" if reshaping else "Set max_batch_size: 0")
    _convert(model, config)


def has_batch_layout(model: Any) -> bool:
    """Return True if the layouts of all inputs and outputs have the batch as the first dimension."""
    helpers = graph.openvino().layout_helpers
    layouts = [helpers.get_layout(port) for port in (*model.inputs, *model.outputs)]
    return all(helpers.has_batch(layout) and helpers.batch_idx(layout) == 0 for layout in layouts)


def pad(model: Any, config: Mapping[str, Any]) -> None:
    """Fix the batch dimension at its maximum, so that smaller batches must be padded. Raises ``NeriteError``."""
    size = int(config["max_batch_size"])
    shapes = {socket.position: (size, *socket.dims[1:]) for socket in graph.inputs(model, config) if socket.dims}
    _reshape(model, shapes, "Leave ENABLE_BATCH_PADDING out")


def _reshape(model: Any, shapes: Mapping[int, tuple[int, ...]], remedy: str) -> None:
    if not shapes:
        return
    with translating(lambda error: graph.translated(error, "reshaping model", remedy)):
        model.reshape({index: graph.openvino().PartialShape(list(dims)) for index, dims in shapes.items()})


def _convert(model: Any, config: Mapping[str, Any]) -> None:
    steps = graph.openvino().preprocess.PrePostProcessor(model)
    inputs = [socket for socket in graph.inputs(model, config) if _differs(socket)]
    outputs = [socket for socket in graph.outputs(model, config) if _differs(socket)]
    for socket in inputs:
        steps.input(socket.position).tensor().set_element_type(_wanted(socket))
    for socket in outputs:
        steps.output(socket.position).tensor().set_element_type(_wanted(socket))
    if inputs or outputs:
        with translating(lambda error: graph.translated(error, "converting data types", "Declare those of the model")):
            steps.build()


def _differs(socket: OpenVinoPort) -> bool:
    if socket.entry is None:
        return False
    wanted = _ELEMENTS[socket.entry["data_type"]]
    # A difference between strings and numbers is reported later, when configuration and model are compared.
    return wanted != socket.element and "string" not in (wanted, socket.element)


def _wanted(socket: OpenVinoPort) -> Any:
    assert socket.entry is not None
    return getattr(graph.openvino().Type, _ELEMENTS[socket.entry["data_type"]])
