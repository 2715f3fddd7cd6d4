"""How an interpreter has to be made, worked out from the configuration. Pure, but for a look at the model file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from nerite.backends.configuration import instance_count
from nerite.backends.cores import share
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.values import integer, thread_count
from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.backends.litert")


class InterpreterPlan(NamedTuple):
    """All that the interpreter of an instance depends on."""

    path: Path
    threads: int


def make(context: ModelContext, instance: InstanceContext) -> InterpreterPlan:
    """Return the plan for an instance of a model.

    Raises ``Unavailable`` if the model file is missing and ``InvalidArgument`` for a value that makes no sense.
    """
    if instance.kind == "GPU":
        raise InvalidArgument(
            f"instance '{instance.name}' is for a GPU, and LiteRT runs on the CPU here: write kind: KIND_CPU"
        )
    path = context.version_directory / (context.config.get("default_model_filename") or "model.tflite")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{context.name}'")
    return InterpreterPlan(path, _threads(context) or share(instance))


def first_instance(context: ModelContext) -> InstanceContext:
    """Return what the first instance of a model will be like, before there is one."""
    return InstanceContext(context.name, sharing=instance_count(context.config))


def _threads(context: ModelContext) -> int:
    threads = thread_count(context, "tflite_num_threads")
    accelerators = context.config.get("optimization", {}).get("execution_accelerators", {})
    for accelerator in (
        *accelerators.get("cpu_execution_accelerator", ()),
        *accelerators.get("gpu_execution_accelerator", ()),
    ):
        if accelerator["name"] == "xnnpack":
            # It is always there; what remains is how wide it is.
            threads = integer(accelerator.get("parameters", {}).get("num_threads", "0")) or threads
        elif accelerator["name"] == "armnn":
            _log.warning("'%s' asks for the accelerator 'armnn'; XNNPACK is used in its place", context.name)
        else:
            raise InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
    if threads < 0:
        raise InvalidArgument(
            f"parameter 'tflite_num_threads' must be non-negative number for tflite model '{context.name}'"
        )
    return threads
