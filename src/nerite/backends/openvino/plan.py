"""How a model has to be read and compiled, worked out from the configuration. Pure, but for a look at the model file.

Threads. Where the configuration does not say otherwise, a model for the CPU is compiled once for all of its instances,
with a stream for each, and the streams divide the cores that we may use. OpenVINO would take those of the machine, and
bind its threads to them: to the same cores for each model, so that two models share some while others are idle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nerite.backends.cores import usable_cores
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.openvino import properties
from nerite.core.errors import InvalidArgument, Unavailable

OTHER_FILES: Final = ("model.onnx", "model.tflite", "model.pdmodel", "model.savedmodel", "model.pb")
"""What a model file may be called, beside ``model.xml``, where the configuration does not name it."""


@dataclass(frozen=True)
class Source:
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


def source(context: ModelContext) -> Source:
    """Return what is to be read. Raises ``Unavailable`` if there is no such file."""
    path = _model_path(context)
    files = [path, *(beside for beside in [path.with_suffix(".bin")] if beside.is_file())]
    return Source(
        path,
        tuple(file.stat().st_mtime_ns for file in files),
        context.parameter("CPU_EXTENSION_PATH"),
        properties.flag(context, "ENABLE_MMAP", "YES"),
    )


def device(context: ModelContext) -> str:
    """Return the device that a model is compiled for, in OpenVINO's words."""
    return context.parameter("TARGET_DEVICE", "CPU").upper()


def make(context: ModelContext, supported: Collection[str]) -> CompilePlan:
    """Return what the configuration says; ``supported`` are the properties that the device has.

    Raises ``InvalidArgument`` for a value that makes no sense.
    """
    return CompilePlan(device(context), tuple(sorted(properties.chosen(context, supported).items())))


def of_instance(plan: CompilePlan, name: str, instance: InstanceContext) -> CompilePlan:
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
