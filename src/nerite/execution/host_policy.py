"""Host policies: which cores the instances of a policy run on, and which node their memory is from.

Flags name policies (``--host-policy``), instance groups choose one (``host_policy``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nerite.config.options import HostPolicy
from nerite.core.errors import Internal, InvalidArgument, Unsupported

_NODES = Path("/sys/devices/system/node")


class Place(NamedTuple):
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

    def place(self, name: str) -> Place:
        """Return where the instances of a policy run: anywhere, if no flag names it.

        Raises Triton's errors, with a remedy, for what cannot be read and what this machine does not have.
        """
        settings = self._settings.get(name)
        if settings is None:
            return Place()
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
        return Place(tuple(sorted(wanted & ours)), node)

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
