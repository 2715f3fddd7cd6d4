"""How a session has to be made, worked out from the configuration. Pure, but for a look at the model file.

Threads. ONNX Runtime gives every session as many threads as the machine has cores, and they spin while they wait. That
suits a program that does nothing else. A server has several instances, an event loop and worker processes on the same
cores. Measured on two cores: a small convolutional network with two instances answered 1.5 to 2.3 times as many
requests once each instance had one thread; and with other work on the machine a batch of 32 took three times as long
where threads span as where they slept. So the cores that we may use are divided among the instances of a model, and
nobody spins, unless the configuration says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nerite.backends.configuration import instance_count, op_libraries
from nerite.backends.cores import share, usable_cores
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.onnxruntime import providers
from nerite.backends.onnxruntime.providers import Provider
from nerite.backends.values import boolean, flag, integer, parameter, setting, thread_count
from nerite.core.errors import InvalidArgument, Unavailable

_DEFAULT_CPU_INSTANCES: Final = 2
"""What a configuration without instance groups gets, on a CPU."""

_DEFAULT_ENTRIES: Final[dict[str, str]] = {
    "session.inter_op.allow_spinning": "0",
    "session.intra_op.allow_spinning": "0",
}
"""Session configuration entries that the parameters of a model may overrule."""

_SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"
_ARENA: Final = re.compile(r"(cpu|gpu):\d+")

_GRAPH_LEVELS: Final[dict[int, str]] = {
    -1: "ORT_ENABLE_BASIC",
    1: "ORT_ENABLE_EXTENDED",
    2: "ORT_DISABLE_ALL",
}
"""``optimization.graph.level`` in ONNX Runtime's names; any other value means all optimizations."""


@dataclass(frozen=True)
class SessionPlan:
    """All that a session depends on. Equal plans make sessions that can stand in for each other."""

    path: Path
    modified_ns: int
    """Of the model file, so that a session of an older file is not taken for this one."""
    providers: tuple[Provider, ...]
    graph_level: str
    parallel: bool
    intra_op_threads: int
    inter_op_threads: int
    global_threads: bool
    """Share one pool, of the sizes above, with every other session."""
    memory_arena: bool
    memory_pattern: bool
    entries: tuple[tuple[str, str], ...]
    """Session configuration entries, passed on as they are."""
    op_libraries: tuple[str, ...]
    cores: tuple[int, ...] = ()
    """Those that its threads run on; empty for any."""


def make(context: ModelContext, instance: InstanceContext) -> SessionPlan:
    """Return the plan for an instance of a model.

    Raises ``Unavailable`` if the model file is missing and ``InvalidArgument`` for a value that makes no sense.
    """
    path = model_path(context)
    config = context.config
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    own = max(1, usable_cores() // instance_count(config, _DEFAULT_CPU_INSTANCES))
    plan = SessionPlan(
        path=path,
        modified_ns=path.stat().st_mtime_ns,
        providers=(),
        graph_level=_GRAPH_LEVELS.get(level, "ORT_ENABLE_ALL"),
        parallel=parameter(context, "execution_mode", "0", _is_parallel, "0 or 1"),
        intra_op_threads=_threads(context, "intra_op_thread_count", own),
        inter_op_threads=_threads(context, "inter_op_thread_count", own),
        global_threads=_global_threads(context),
        memory_arena=flag(context, "enable_mem_arena", default=True),
        memory_pattern=flag(context, "enable_mem_pattern", default=True),
        entries=tuple(sorted({**_DEFAULT_ENTRIES, **_entries(config)}.items())),
        op_libraries=op_libraries(context),
    )
    return of_instance(plan, context, instance)


def of_instance(plan: SessionPlan, context: ModelContext, instance: InstanceContext) -> SessionPlan:
    """Return the plan of a model for one of its instances: where that runs, on what and how wide."""
    plan = replace(plan, providers=providers.wanted(context, instance))
    if not instance.cores:
        return plan
    own = share(instance)
    return replace(
        plan,
        intra_op_threads=_threads(context, "intra_op_thread_count", own),
        inter_op_threads=_threads(context, "inter_op_thread_count", own),
        cores=instance.cores,
    )


def run_entries(context: ModelContext, plan: SessionPlan) -> Mapping[str, str]:
    """Return the configuration entries of each run. Raises ``InvalidArgument`` for what would fail every run."""
    if not context.parameter(_SHRINKAGE):
        return {}
    groups = context.config.get("instance_group", ())
    there = {f"gpu:{gpu}" for group in groups for gpu in group.get("gpus", ())}
    if plan.memory_arena:
        there.add("cpu:0")

    def checked(text: str) -> str:
        names = [name if ":" in name else f"{name}:0" for name in text.removesuffix(";").split(";")]
        # ONNX Runtime looks for the first one alone.
        if names[0] not in there or not all(map(_ARENA.fullmatch, names)):
            raise InvalidArgument(f"'{text}' names an arena that there is not")
        return text

    expected = "cpu:0 (with 'enable_mem_arena') and gpu:N of the model's GPUs, with ';' between them"
    return {_SHRINKAGE: parameter(context, _SHRINKAGE, "", checked, expected)}


def own_entries(plan: SessionPlan) -> dict[str, str]:
    """Return the session configuration entries that the model itself has set."""
    return {key: value for key, value in plan.entries if _DEFAULT_ENTRIES.get(key) != value}


def model_path(context: ModelContext) -> Path:
    """Return the model file: the named one, or ``model.onnx`` in a directory of that name."""
    path = context.version_directory / (context.config.get("default_model_filename") or "model.onnx")
    if path.is_dir():
        path /= "model.onnx"
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{context.name}'")
    return path


def first_instance(context: ModelContext) -> InstanceContext:
    """Return what the first instance of a model will be like, before there is one."""
    groups: Sequence[Mapping[str, Any]] = context.config.get("instance_group") or ({},)
    group = next((group for group in groups if group.get("kind") == "KIND_GPU"), groups[0])
    kind = str(group.get("kind", "KIND_CPU")).removeprefix("KIND_")
    return InstanceContext(
        context.name,
        "CPU" if kind == "AUTO" else kind,
        next(iter(group.get("gpus", ())), 0),
    )


def _is_parallel(text: str) -> bool:
    mode = integer(text)
    if mode not in (0, 1):
        raise InvalidArgument(
            f"Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got {mode} ."
        )
    return mode == 1


def _threads(context: ModelContext, key: str, own: int) -> int:
    """Return the size of a pool: the model's own, the backend's, or the instance's own share of the cores."""
    count = 0 if _global_threads(context) else thread_count(context, key)
    count = count or setting(context, key, "0", integer, "a number of threads, or 0")
    if count > 0:
        return count
    return usable_cores() if _global_threads(context) else own


def _global_threads(context: ModelContext) -> bool:
    return setting(context, "enable-global-threadpool", "0", boolean, "true or false")


def _entries(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that are session configuration entries of ONNX Runtime, by their own names."""
    parameters = config.get("parameters", {})
    return {key: str(value["string_value"]) for key, value in parameters.items() if key.startswith("session.")}
