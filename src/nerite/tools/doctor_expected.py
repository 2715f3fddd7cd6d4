"""Findings of ``nerite doctor`` about what was asked for: GPUs, the links between them, and the nodes of a group."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from nerite.observability import gpus
from nerite.observability.gpus import GpuLibrary
from nerite.tools.doctor_machine import DoctorFinding, ok, problem

_INFINIBAND: Final = Path("/sys/class/infiniband")
_ACTIVE: Final = "ACTIVE"
_INTERVAL: Final = 1.0
"""Seconds between two attempts to find the nodes."""
SIZE: Final = "LWS_GROUP_SIZE"
LEADER: Final = "LWS_LEADER_ADDRESS"


class Expected(NamedTuple):
    """What was asked for; None: it is not checked."""

    gpus: int | None = None
    """GPUs of this node."""
    nvlink: bool = False
    """Each pair of them is connected by NVLink."""
    rdma: int | None = None
    """Active ports for remote direct memory access (InfiniBand, RoCE) of this node."""
    nodes: int | None = None
    """Nodes of the group, with this one."""
    wait: float = 0.0
    """Seconds in which the names of the nodes must become known."""


def findings(expected: Expected) -> Iterator[DoctorFinding]:
    """Yield findings about this machine and its group."""
    if expected.gpus is not None or expected.nvlink:
        library, why_not = gpus.find_library()
        yield from gpu_findings(expected, library, why_not, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if expected.rdma is not None:
        yield rdma_finding(expected.rdma, _INFINIBAND)
    if expected.nodes is not None:
        yield from node_findings(expected.nodes, os.environ, _Lookup(expected.wait))


def gpu_findings(expected: Expected, library: GpuLibrary, why_not: str, visible: str | None) -> Iterator[DoctorFinding]:
    """Yield findings about the number of GPUs, and the links between them."""
    found = library.gpus(visible)
    if expected.gpus is not None:
        text = f"{len(found)} of the {expected.gpus} GPUs that were asked for"
        hint = f" ({why_not})" if why_not else ""
        remedy = (
            f"nvidia-smi shows those that the driver finds{hint}. In Kubernetes, set the limit nvidia.com/gpu of the "
            "container, and check the device plugin of the node."
        )
        yield ok(text) if len(found) == expected.gpus else problem(text, remedy)
    if expected.nvlink:
        pairs = list(itertools.combinations(found, 2))
        apart = [f"{a.number} and {b.number}" for a, b in pairs if not library.linked(a, b)]
        if not pairs:
            yield problem("no pair of GPUs that NVLink could connect", "Ask for two GPUs or more with --expect-gpus.")
        elif apart:
            remedy = "nvidia-smi topo -m shows how they are connected. Choose nodes by the label of such machines."
            yield problem(f"no NVLink between the GPUs {', '.join(apart)}", remedy)
        else:
            yield ok("NVLink between all GPUs")


def rdma_finding(wanted: int, folder: Path) -> DoctorFinding:
    """Return the finding about ports for remote direct memory access, as the kernel lists them in ``folder``."""
    states = [file.read_text() for file in folder.glob("*/ports/*/state")]
    active = sum(_ACTIVE in state for state in states)
    text = f"{active} of the {wanted} active RDMA ports that were asked for"
    if active >= wanted:
        return ok(text)
    remedy = (
        f"{len(states)} ports are there. ibstat shows why one is not active. In Kubernetes, the container needs the "
        "resource of the RDMA device plugin."
    )
    return problem(text, remedy)


def node_findings(wanted: int, environment: Mapping[str, str], known: Callable[[str], bool]) -> Iterator[DoctorFinding]:
    """Yield findings about the nodes of a LeaderWorkerSet's group; ``known`` says whether a name has an address."""
    size, leader = environment.get(SIZE, ""), environment.get(LEADER, "")
    if not (size and leader):
        remedy = f"LeaderWorkerSet sets {SIZE} and {LEADER}. Leave --expect-nodes out on a single node."
        yield problem("this is no pod of a LeaderWorkerSet", remedy)
        return
    text = f"{size} of the {wanted} nodes that were asked for"
    if size != str(wanted):
        yield problem(text, "Set leaderWorkerTemplate.size of the LeaderWorkerSet.")
        return
    yield ok(text)
    names = node_names(leader, wanted)
    missing = [name for name in names if not known(name)]
    if missing:
        remedy = "kubectl get pods shows whether they are scheduled; see also --wait."
        yield problem(f"no address of {', '.join(missing)}", remedy)
    else:
        yield ok(f"addresses of {', '.join(names)}")


def node_names(leader: str, size: int) -> list[str]:
    """Return the names of the nodes of a group: those of workers are the leader's with their number."""
    host, dot, rest = leader.partition(".")
    return [leader, *(f"{host}-{number}{dot}{rest}" for number in range(1, size))]


class _Lookup:
    """Looks up names until a time has passed."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def __call__(self, name: str) -> bool:
        while True:
            try:
                socket.getaddrinfo(name, None)
                return True
            except OSError:
                if time.monotonic() >= self._until:
                    return False
            time.sleep(_INTERVAL)
