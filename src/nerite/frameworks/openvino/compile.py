"""How a model has to be read and compiled, worked out from the configuration. Pure, but for a look at the model file.

Threads. Where the configuration does not say otherwise, a model for the CPU is compiled once for all of its instances,
with a stream for each, and the streams divide the cores that we may use. OpenVINO would take those of the machine, and
bind its threads to them: to the same cores for each model, so that two models share some while others are idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nerite.backends.configuration import batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import usable_cores
from nerite.config.mistake import nearest
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.frameworks.openvino import graph
from nerite.frameworks.openvino.graph import ModelSocket

# What the ``parameters`` of a configuration say to OpenVINO. Pure.
#
# Triton's names come first; they are OpenVINO's own but for ``HINT_BF16``. Any other property that a device has is
# set under its own name, with a value as OpenVINO writes it. Parameters that are neither, and look like no such name,
# belong to somebody else.

_log = logging.getLogger("nerite.frameworks.openvino")

OWN: Final = (
    "CPU_EXTENSION_PATH",
    "ENABLE_BATCH_PADDING",
    "ENABLE_MMAP",
    "RESHAPE_IO_LAYERS",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "TARGET_DEVICE",
)
"""Parameters that say how a model is read and made ready, and are no properties of a device."""

ANY_DEVICE: Final = ("ALLOW_AUTO_BATCHING", "AUTO_BATCH_TIMEOUT", "CACHE_DIR", "CACHE_MODE")
"""Properties that each device takes and few tell of."""

_SERVER: Final = ("EXECUTION_MODE",)
"""Known elsewhere, and too much like one of the properties."""

_CLOSE: Final = 0.8
"""A parameter that is as close to a known one as this was meant to be that."""


def chosen_properties(context: ModelContext, device: Collection[str]) -> dict[str, str]:
    """Return the properties that the configuration sets, by OpenVINO's names; ``device`` are those the device has.

    Raises ``InvalidArgument`` for a value that makes no sense and for a name that is nearly one of ours.
    """
    found = {}
    known = {*_READERS, *OWN, *ANY_DEVICE, *device}
    for key in context.config.get("parameters", {}):
        value = context.parameter(key)
        if key in _READERS:
            name, read = _READERS[key]
            text = read(key, value)
            if name in device:
                found[name] = text
            else:
                _log.warning("model '%s': its device has no property %s, '%s' says nothing", context.name, name, key)
        elif key in (*ANY_DEVICE, *device):
            found[key] = value
        elif key not in (*OWN, *_SERVER):
            _check_foreign(key, known)
    if cache := context.settings.get("cache-dir"):
        found.setdefault("CACHE_DIR", cache)
    return found


def flag_property(context: ModelContext, key: str, default: str = "NO") -> bool:
    """Return a parameter that is YES or NO."""
    value = (context.parameter(key) or default).upper()
    if value not in ("YES", "NO"):
        raise InvalidArgument(f"expected the parameter '{key}' to be YES or NO, got {context.parameter(key)}")
    return value == "YES"


def _check_foreign(key: str, known: Collection[str]) -> None:
    if meant := nearest(key.upper(), sorted(known), _CLOSE):
        raise InvalidArgument(f"the parameter '{key}' is not yet supported by openvino backend. Did you mean {meant}?")


def _count(key: str, value: str) -> str:
    if not value.isdecimal():
        raise InvalidArgument(f"expected the parameter '{key}' to be a non-negative number, got {value}")
    return value


def _bfloat16(key: str, value: str) -> str:
    if value.upper() != "YES":
        raise InvalidArgument(f"expected the parameter '{key}' to be YES, got {value}")
    return "bf16"


def _streams(key: str, value: str) -> str:
    if not value.isdecimal() and value.upper() not in ("AUTO", "NUMA"):
        raise InvalidArgument(f"expected the parameter '{key}' to be either AUTO/NUMA/<int_value>, got {value}")
    return value.upper()


def _hint(key: str, value: str) -> str:
    hints = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
    if value.upper() not in hints:
        raise InvalidArgument(f"expected the parameter '{key}' to be {'/'.join(hints)}, got {value}")
    return value.upper()


_READERS: Final[Mapping[str, tuple[str, Callable[[str, str], str]]]] = {
    "INFERENCE_NUM_THREADS": ("INFERENCE_NUM_THREADS", _count),
    "COMPILATION_NUM_THREADS": ("COMPILATION_NUM_THREADS", _count),
    "HINT_BF16": ("INFERENCE_PRECISION_HINT", _bfloat16),
    "NUM_STREAMS": ("NUM_STREAMS", _streams),
    "PERFORMANCE_HINT": ("PERFORMANCE_HINT", _hint),
}
"""Triton's parameters that are properties: OpenVINO's name, and what reads the value."""

OTHER_FILES: Final = ("model.onnx", "model.tflite", "model.pdmodel", "model.savedmodel", "model.pb")
"""What a model file may be called, beside ``model.xml``, where the configuration does not name it."""


@dataclass(frozen=True)
class ModelSource:
    """A model file, and how it is read. Equal sources are the same model."""

    path: Path
    modified_ns: tuple[int, ...]
    """Of the file and of the weights beside it."""
    extension: str
    """A library of custom operators; empty for none."""
    map_weights: bool
    """Leave the weights in the file until they are needed."""


@dataclass(frozen=True)
class CompilePlan:
    """All that a compiled model depends on, beside its source and its configuration. Equal plans make equal models."""

    device: str
    properties: tuple[tuple[str, str], ...]
    cores: tuple[int, ...] = ()
    """Those that its threads run on; empty for any."""


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
    """Return the device that a model is compiled for, in OpenVINO's words."""
    return context.parameter("TARGET_DEVICE", "CPU").upper()


def make_plan(context: ModelContext, supported: Collection[str]) -> CompilePlan:
    """Return what the configuration says; ``supported`` are the properties that the device has.

    Raises ``InvalidArgument`` for a value that makes no sense.
    """
    return CompilePlan(plan_device(context), tuple(sorted(chosen_properties(context, supported).items())))


def instance_plan(plan: CompilePlan, name: str, instance: InstanceContext) -> CompilePlan:
    """Return the plan of a model, called ``name``, for one of its instances: where that runs, and how wide.

    Raises ``InvalidArgument`` for an instance on what is no CPU: that is a matter of ``TARGET_DEVICE``.
    """
    if instance.kind != "CPU":
        raise InvalidArgument(
            f"unable to load model '{name}', Triton OpenVINO backend supports only Kind CPU and AUTO. Set kind: "
            "KIND_CPU, and the parameter TARGET_DEVICE to the device"
        )
    if plan.device != "CPU":
        return plan
    cores = len(instance.cores) or usable_cores()
    said = dict(plan.properties)
    own = {"INFERENCE_NUM_THREADS": str(cores), "ENABLE_CPU_PINNING": "NO"}
    if "PERFORMANCE_HINT" not in said:
        own["NUM_STREAMS"] = str(min(instance.sharing, cores))
    return replace(plan, properties=tuple(sorted({**own, **said}.items())), cores=instance.cores)


def _model_path(context: ModelContext) -> Path:
    path = context.version_directory / str(context.config.get("default_model_filename") or "model.xml")
    if not path.exists():
        raise Unavailable(
            f"unable to find '{path}' for model '{context.name}'. It may also be {', '.join(OTHER_FILES)}; "
            "default_model_filename may name another"
        )
    return path


# Reading a model file: what OpenVINO makes of it, and what to do about one that is broken.

_HEAD: Final = 4096

_REMEDIES: Final = (
    ("Empty weights data", "The weights lie in a file of their own: copy '{weights}', too"),
    ("weights in bin file", "'{weights}' is cut off, or of another model: copy both files once more"),
    ("ONNX operations", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("No conversion rule", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("doesn't contain the operation", "Install a newer OpenVINO, or name a library that has it: CPU_EXTENSION_PATH"),
    ("", "Is '{path}' complete? Copy it once more, or export it anew"),
)
"""What to do, by a part of what OpenVINO says."""


def read_model(source: ModelSource) -> Any:
    """Return an ``openvino.Model``. Raises ``NeriteError`` with what is wrong with the file, and what to do."""
    path = source.path
    _check_head(path)
    core = graph.core(source.extension)
    try:
        if source.map_weights:
            return core.read_model(str(path))
        return core.read_model(str(path), config={"ENABLE_MMAP": "NO"})
    except Exception as error:  # Whatever the framework raises says what is wrong with the file.
        said = str(error)
        remedy = next(remedy for part, remedy in _REMEDIES if part in said)
        raise graph.translated(
            error, "reading model", remedy.format(path=path, weights=path.with_suffix(".bin"))
        ) from error


def _check_head(path: Path) -> None:
    """Refuse what is plainly something else; OpenVINO would try each of its readers on it, and they are noisy."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD)
    said = "openvino error in reading model : "
    if not head:
        raise Internal(f"{said}'{path}' is empty: copy it once more")
    if path.suffix == ".xml" and b"<net" not in head:
        raise Internal(f"{said}'{path}' is no OpenVINO IR: export the model with openvino.save_model")
    if path.suffix == ".tflite" and head[4:8] != b"TFL3":
        raise Internal(f"{said}'{path}' is no TFLite model: export it once more")


# Making a model what its configuration says of it, as far as OpenVINO can: shapes, the batch, element types.

_ELEMENTS: Final = {datatype.config_name: element for element, datatype in graph.DATATYPES.items()}


def fit_model(model: Any, context: ModelContext, config: Mapping[str, Any]) -> None:
    """Change ``model`` as ``config`` asks for. Raises ``NeriteError`` if it cannot be like that.

    - ``max_batch_size``: the first dimension becomes free;
    - ``RESHAPE_IO_LAYERS``: inputs get the shapes that are declared;
    - a ``data_type`` that differs between numbers: it is converted.
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
    """Return whether the model says, by its layouts, that the first dimension of everything is that of the batch."""
    helpers = graph.openvino().layout_helpers
    layouts = [helpers.get_layout(port) for port in (*model.inputs, *model.outputs)]
    return all(helpers.has_batch(layout) and helpers.batch_idx(layout) == 0 for layout in layouts)


def pad(model: Any, config: Mapping[str, Any]) -> None:
    """Fix the batch at its most: what is missing has to be filled up. Raises ``NeriteError``."""
    size = int(config["max_batch_size"])
    shapes = {socket.position: (size, *socket.dims[1:]) for socket in graph.inputs(model, config) if socket.dims}
    _reshape(model, shapes, "Leave ENABLE_BATCH_PADDING out")


def _reshape(model: Any, shapes: Mapping[int, tuple[int, ...]], remedy: str) -> None:
    if not shapes:
        return
    try:
        model.reshape({index: graph.openvino().PartialShape(list(dims)) for index, dims in shapes.items()})
    except Exception as error:  # Whatever the framework raises says why the model cannot have such shapes.
        raise graph.translated(error, "reshaping model", remedy) from error


def _convert(model: Any, config: Mapping[str, Any]) -> None:
    steps = graph.openvino().preprocess.PrePostProcessor(model)
    inputs = [socket for socket in graph.inputs(model, config) if _differs(socket)]
    outputs = [socket for socket in graph.outputs(model, config) if _differs(socket)]
    for socket in inputs:
        steps.input(socket.position).tensor().set_element_type(_wanted(socket))
    for socket in outputs:
        steps.output(socket.position).tensor().set_element_type(_wanted(socket))
    if inputs or outputs:
        try:
            steps.build()
        except Exception as error:  # Whatever the framework raises says why it cannot convert.
            raise graph.translated(error, "converting data types", "Declare those of the model") from error


def _differs(socket: ModelSocket) -> bool:
    if socket.entry is None:
        return False
    wanted = _ELEMENTS[socket.entry["data_type"]]
    # Where one of them is a string, the agreement of configuration and model, which comes later, has the words for it.
    return wanted != socket.element and "string" not in (wanted, socket.element)


def _wanted(socket: ModelSocket) -> Any:
    assert socket.entry is not None
    return getattr(graph.openvino().Type, _ELEMENTS[socket.entry["data_type"]])
