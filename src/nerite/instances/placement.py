"""Host policies: which cores the instances of a policy run on, and which node their memory is from.

Flags name policies (``--host-policy``), instance groups choose one (``host_policy``).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import core_share
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.config.options import HostPolicy
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.scheduling.rate_limiter import EVERYWHERE, ResourceClaim, ResourcePool

_NODES = Path("/sys/devices/system/node")


class HostPlace(NamedTuple):
    """Where an instance runs: without cores wherever the system likes, without a node with memory from any."""

    cores: tuple[int, ...] = ()
    memory_node: int = -1


class HostPolicies:
    """What the flags say. It is made sense of where an instance needs it."""

    def __init__(self, settings: Iterable[HostPolicy] = (), nodes: Path = _NODES) -> None:
        self._settings: dict[str, dict[str, str]] = {}
        for policy, setting, value in settings:
            self._settings.setdefault(policy, {})[setting] = value
        self._nodes = nodes

    def place(self, name: str) -> HostPlace:
        """Return where the instances of a policy run: anywhere, if no flag names it.

        Raises Triton's errors, with a remedy, for what cannot be read and what this machine does not have.
        """
        settings = self._settings.get(name)
        if settings is None:
            return HostPlace()
        if not hasattr(os, "sched_setaffinity"):
            raise Unsupported(f"host policy '{name}' cannot be followed: this system does not let us choose cores")
        node = -1
        wanted: set[int] = set()
        if "numa-node" in settings:
            node = _integer("numa-node", settings["numa-node"])
            wanted = self._cores_of(node, name)
        if "cpu-cores" in settings:
            wanted = _range(settings["cpu-cores"])
        ours = os.sched_getaffinity(0)
        if not wanted & ours:
            raise Internal(
                f"Unable to set NUMA thread affinity: Success. Host policy '{name}' names none of the cores that this "
                f"server may use: {_listed(ours)}."
            )
        return HostPlace(tuple(sorted(wanted & ours)), node)

    def _cores_of(self, node: int, name: str) -> set[int]:
        try:
            parts = (self._nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        except OSError:
            there = [int(path.name.removeprefix("node")) for path in self._nodes.glob("node[0-9]*")]
            raise Internal(
                f"Unable to set NUMA memory policy: Invalid argument. Host policy '{name}' names node {node}; this "
                f"machine has {_listed(there) or 'no nodes'}."
            ) from None
        return {core for part in parts if part for core in _range(part if "-" in part else f"{part}-{part}")}


def _range(text: str) -> set[int]:
    lowest, dash, highest = text.partition("-")
    if not dash:
        raise InvalidArgument(
            "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got " + text
        )
    return set(range(_integer("cpu-cores", lowest), _integer("cpu-cores", highest) + 1))


def _integer(setting: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidArgument(f"Parsing '{setting}' value: Can't parse '{text}' to integer")
    return int(text)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


# Settling down where an instance belongs: on its cores, with memory from its node. For workers, too.

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, by machine: the C library has no function for it."""
_BIND: Final = 2
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_to_place(cores: Collection[int], memory_node: int) -> str:
    """Have this thread, and all that it starts from now on, run on ``cores`` and get memory from a node alone.

    No cores and a node below 0 change nothing. Returns what could not be done, to be logged: containers often forbid
    the choice of memory, and an instance runs without it.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    refusal = _bind_memory(memory_node) if memory_node >= 0 else ""
    return refusal and f"memory may be from any NUMA node, not from node {memory_node} alone: {refusal}"


def _bind_memory(node: int) -> str:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"it is not known how to ask for that on {platform.machine()}"
    words = (ctypes.c_ulong * (node // _BITS + 1))()
    words[node // _BITS] = 1 << node % _BITS
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _BIND, words, len(words) * _BITS + 1) == 0:
        return ""
    return f"set_mempolicy was refused ({os.strerror(ctypes.get_errno())})"


# How many threads the libraries in a worker start: as many as it has cores for itself.
#
# Each library starts a thread for every core, so that several workers get into each other's way: two that multiply
# matrices on two cores do a third more with one thread each. For workers, too.

PARAMETER: Final = "INTRA_OP_THREAD_COUNT"
"""Of a model that knows better; 0 leaves it to the libraries."""
_GENERAL: Final = "OMP_NUM_THREADS"
_OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
_VARIABLES: Final = (_GENERAL, _OPENBLAS, "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What libraries read when they are loaded: the first of them PyTorch and many others."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
"""What its builds call one function. Those that end in ``_`` or ``_64_`` are for Fortran, and take a pointer."""


def thread_variables(context: ModelContext, instance: InstanceContext, ours: Mapping[str, str]) -> dict[str, str]:
    """Return what the environment of a worker should say. ``ours``, the server's own environment, has precedence.

    Raises ``InvalidArgument`` for a parameter of the model that is no number.
    """
    told = context.parameter(PARAMETER)
    if told:
        if not told.isdecimal():
            raise InvalidArgument(
                f"parameter '{PARAMETER}' of model '{context.name}' is '{told}'; it may be a number of threads, "
                "or 0 to leave it to the libraries"
            )
        return dict.fromkeys(_VARIABLES, told) if int(told) else {}
    if _GENERAL in ours:
        return {}
    return {name: str(core_share(instance)) for name in _VARIABLES if name not in ours}


def adopt_thread_counts(environment: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> None:
    """Have OpenBLAS do what ``environment`` says: with numpy, it was loaded before that was known."""
    count = environment.get(_OPENBLAS)
    if count is None:
        return
    with suppress(OSError):  # not on Linux
        for path in {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "openblas" in line}:
            library = ctypes.CDLL(path)
            for setter in _SETTERS:
                if hasattr(library, setter):
                    library[setter](int(count))


# The instances that the instance groups of a model ask for.


@dataclass(frozen=True)
class InstancePlan:
    """One instance: what its backend is told, and what is asked of it. Equal plans make equal instances."""

    context: InstanceContext
    passive: bool
    """It is there, and gets no requests."""
    claim: ResourceClaim
    """What it needs to execute, where executions are limited."""


def instance_plans(config: ModelConfig, policies: HostPolicies) -> list[InstancePlan]:
    """Return the instances that a model has. Raises ``NeriteError`` for a host policy that cannot be followed."""
    plans = [plan for group in config.instance_group for plan in _of_group(group, policies)]
    sharing = Counter(plan.context.cores for plan in plans)
    return [replace(plan, context=replace(plan.context, sharing=sharing[plan.context.cores])) for plan in plans]


def _of_group(group: ModelInstanceGroup, policies: HostPolicies) -> Iterator[InstancePlan]:
    kind = group.kind.removeprefix("KIND_")
    count = max(group.count, 1)
    for index, device in enumerate(group.gpus or (0,)):
        place = policies.place(group.host_policy or (f"gpu_{device}" if kind == "GPU" else kind.lower()))
        claim = _claim(group, device)
        for number in range(index * count, (index + 1) * count):
            context = InstanceContext(f"{group.name}_{number}", kind, device, *place)
            yield InstancePlan(context, group.passive, claim)


def _claim(group: ModelInstanceGroup, device: int) -> ResourceClaim:
    limiter = group.rate_limiter
    if limiter is None:
        return ResourceClaim()
    # Where a resource is named twice, the second time holds.
    needs = {ResourcePool(each.name, EVERYWHERE if each.global_ else device): each.count for each in limiter.resources}
    return ResourceClaim(tuple((pool, count) for pool, count in needs.items() if count), limiter.priority)
