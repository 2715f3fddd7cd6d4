"""How a model is to run, worked out from its configuration. Pure, but for a look at the model's files.

Threads. PyTorch takes every core for each operation, and its threads spin while they wait for the next. In a server
they share the cores with other instances and with the loop: so an instance gets its share of them, and nobody spins
(``framework``), unless the configuration says otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nerite.backends.configuration import batching, instance_count
from nerite.backends.cores import share, usable_cores
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.pytorch.artifact import Artifact, find
from nerite.backends.values import flag, placed, thread_count
from nerite.core.errors import InvalidArgument

_OPTIONS: Final = "options of torch.compile as a JSON object"
_SWITCHES: Final = ("ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")


@dataclass(frozen=True)
class Plan:
    """What the configuration of a model asks for, and the file it is about."""

    artifact: Artifact
    inference_mode: bool
    optimized: bool
    cudnn: bool
    clean_cache: bool
    share: bool | None
    """Whether instances on one device have one program; None: where that is safe and pays."""
    threads: int
    """Within an operation; 0: the instance's share of the cores."""
    inter_op_threads: int
    """Between the operations of TorchScript; 0: as PyTorch likes."""
    switches: tuple[tuple[str, bool], ...]
    """Parameters that turn parts of TorchScript's executor on or off, and which."""
    compile: str | None
    """Options of ``torch.compile``, as JSON; None: as it is."""
    model_class: str
    """Of a module that is written in Python; empty: the one there is."""
    batching: bool
    instances: int
    """How many there will be, on all devices."""


def make(context: ModelContext) -> Plan:
    """Return the plan of a model.

    Raises ``InvalidArgument`` for a parameter that makes no sense, and as ``artifact.find``.
    """
    return Plan(
        artifact=find(context),
        inference_mode=flag(context, "INFERENCE_MODE", default=True),
        optimized=not flag(context, "DISABLE_OPTIMIZED_EXECUTION", default=False),
        cudnn=not flag(context, "DISABLE_CUDNN", default=False),
        clean_cache=flag(context, "ENABLE_CACHE_CLEANING", default=False),
        share=shares(context),
        threads=_count(context, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        inter_op_threads=_count(context, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
        switches=tuple((key, flag(context, key, default=True)) for key in _SWITCHES if context.parameter(key)),
        compile=_compile_options(context),
        model_class=context.parameter("MODEL_CLASS"),
        batching=batching(context.config),
        instances=instance_count(context.config),
    )


def shares(context: ModelContext) -> bool | None:
    """Return whether instances are to share their weights; None where the configuration does not say."""
    key = "ENABLE_WEIGHT_SHARING"
    return flag(context, key, default=False) if context.parameter(key) else None


def threads(plan: Plan, instance: InstanceContext) -> int:
    """Return how many threads an instance computes with: the model's own word, the environment's, or its share."""
    if plan.threads > 0:
        return plan.threads
    if (told := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(told))
    return share(instance) if instance.cores else max(1, usable_cores() // plan.instances)


def device(instance: InstanceContext) -> str:
    """Return the device of an instance, as PyTorch calls it; empty where the model has its own."""
    return {"GPU": f"cuda:{instance.device}", "MODEL": ""}.get(instance.kind, "cpu")


def first_device(config: Mapping[str, Any]) -> str:
    """Return the device of the first instance, before there is one."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or ({},)
    kind = str(groups[0].get("kind", "KIND_CPU")).removeprefix("KIND_")
    return device(InstanceContext("", kind, next(iter(groups[0].get("gpus", ())), 0)))


def _count(context: ModelContext, key: str, other: str) -> int:
    """Return a number of threads; ``other`` is what Triton calls it for models written in Python."""
    key = other if context.parameter(other) and not context.parameter(key) else key
    return max(0, thread_count(context, key))


def _compile_options(context: ModelContext) -> str | None:
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    text = context.parameter(key)
    if not text:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise placed(InvalidArgument(str(error)), context, key, _OPTIONS) from None
    if not isinstance(options, dict):
        raise placed(InvalidArgument(f"{text} is no object"), context, key, _OPTIONS)
    if "model" in options:
        raise InvalidArgument("'model' is not an optional parameter for 'torch.compile'")
    return None if options.get("disable") is True else json.dumps(options, sort_keys=True)
