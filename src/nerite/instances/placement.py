"""Placement of instances: host policies, thread counts, and instance plans.

A host policy names the cores that its instances run on, and the NUMA node of their memory. Flags define policies
(``--host-policy``), instance groups choose one (``host_policy``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import core_share
from nerite.config.flag import HostPolicy
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.thread_binding import GENERAL, OPENBLAS, OPENBLAS_POLLING, POLLING
from nerite.scheduling.rate_limiter import EVERYWHERE, ResourceClaim, ResourcePool

_NODES = Path("/sys/devices/system/node")


class HostPlace(NamedTuple):
    """Where an instance runs. Empty cores mean any core; a negative node means memory from any node."""

    cores: tuple[int, ...] = ()
    memory_node: int = -1


class HostPolicies:
    """The host policies of the flags. A policy is only parsed when an instance needs it."""

    def __init__(self, settings: Iterable[HostPolicy] = (), nodes: Path = _NODES) -> None:
        self._settings: dict[str, dict[str, str]] = {}
        for policy, setting, value in settings:
            self._settings.setdefault(policy, {})[setting] = value
        self._nodes = nodes

    def place(self, name: str) -> HostPlace:
        """Return where the instances of a policy run: anywhere if no flag defines it.

        Raises Triton's errors, with a remedy, for settings that cannot be parsed or do not exist on this machine.
        """
        settings = self._settings.get(name)
        if settings is None:
            return HostPlace()
        if not hasattr(os, "sched_setaffinity"):
            raise Unsupported(f"host policy '{name}' cannot be applied: this system has no processor affinity")
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


# Number of threads that libraries in a worker start: the number of cores that it has for itself.
#
# By default each library starts a thread per core, so that several workers compete for the cores: two that multiply
# matrices on two cores are a third faster with one thread each.

PARAMETER: Final = "INTRA_OP_THREAD_COUNT"
"""Parameter with which a model overrides that; 0 leaves it to the libraries."""
_VARIABLES: Final = (GENERAL, OPENBLAS, "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Read by libraries when they are loaded: the first one by PyTorch and many others."""


def thread_variables(context: ModelContext, instance: InstanceContext, ours: Mapping[str, str]) -> dict[str, str]:
    """Return variables for threads in the environment of a worker. ``ours``, the server's environment, has precedence.

    Raises ``InvalidArgument`` for a parameter of the model that is not a number.
    """
    polling = {} if OPENBLAS_POLLING in ours else {OPENBLAS_POLLING: POLLING}
    value = context.parameter(PARAMETER)
    if value:
        if not value.isdecimal():
            raise InvalidArgument(
                f"parameter '{PARAMETER}' of model '{context.name}' is '{value}'; it must be a number of threads, "
                "or 0 to leave it to the libraries"
            )
        return polling | dict.fromkeys(_VARIABLES, value) if int(value) else {}
    if GENERAL in ours:
        return polling
    return polling | {name: str(core_share(instance)) for name in _VARIABLES if name not in ours}


# Plans of the instances that the instance groups of a model configure.


@dataclass(frozen=True)
class InstancePlan:
    """Configuration of one instance. Equal plans make equal instances."""

    context: InstanceContext
    passive: bool
    """It exists, but gets no requests."""
    claim: ResourceClaim
    """Resources that it needs to execute, where executions are limited."""


def instance_plans(config: ModelConfig, policies: HostPolicies) -> list[InstancePlan]:
    """Return the plans of a model's instances. Raises ``NeriteError`` for a host policy that cannot be applied."""
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
    # If a resource is named twice, the last count applies.
    needs = {ResourcePool(each.name, EVERYWHERE if each.global_ else device): each.count for each in limiter.resources}
    return ResourceClaim(tuple((pool, count) for pool, count in needs.items() if count), limiter.priority)
