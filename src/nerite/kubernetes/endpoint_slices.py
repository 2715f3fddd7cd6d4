"""Members of a pool out of the EndpointSlices of a service. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from nerite.balancing.member import Member, ServerKind
from nerite.cluster.addresses import MAX_MEMBERS, join_address, member_of
from nerite.cluster.kubernetes_names import ServiceReference

GRPC_PORT: Final = "grpc"
"""Name of the port for gRPC, unless the pool has a number for it."""
CAPACITY: Final = "nerite/capacity"
"""Annotation of an EndpointSlice with the capacity of its endpoints in relation to others."""
_FAMILIES: Final = ("IPv4", "IPv6")


class FoundMembers(NamedTuple):
    """What the EndpointSlices of a service say."""

    members: tuple[Member, ...]
    """Those that serve, the terminating ones included."""
    problem: str = ""
    """Why endpoints were left out, as a sentence about the service; empty if none was."""


def members_of_slices(
    slices: Iterable[Mapping[str, Any]],
    service: ServiceReference,
    kind: ServerKind,
    grpc_port: int = 0,
    metrics_port: int = 0,
) -> FoundMembers:
    """Return the members. ``grpc_port``: number of the port for gRPC; 0: the port of this name, if there is one.

    ``metrics_port`` is that of their metrics; 0: not known.

    Endpoints that do not serve (yet) are no members. Those that terminate and still serve are members that drain.
    Of a service with two address families, each pod is a member once.
    """
    found: dict[str, Member] = {}
    problem = ""
    for each in sorted(slices, key=_order):
        ports = [port for port in each.get("ports") or () if isinstance(port, dict)]
        number = _number(ports, service.port)
        endpoints = list(_serving(each))
        if endpoints and not number:
            names = ", ".join(f"{port.get('name') or 'without a name'} ({port.get('port')})" for port in ports[:8])
            problem = f"has no port '{service.port}', but {names or 'none'}: correct the port in the cluster file"
            continue
        grpc = grpc_port or _number(ports, GRPC_PORT)
        capacity = _annotation(each, CAPACITY)
        for name, address, terminating in endpoints:
            if name in found:
                continue
            if len(found) >= MAX_MEMBERS:
                problem = f"has more than {MAX_MEMBERS} endpoints: the others are left out"
                break
            table = {"http": join_address(address, number), "name": name}
            try:
                member = member_of({**table, "capacity": capacity} if capacity else table, kind, grpc, metrics_port)
            except ValueError as error:
                problem = f"has an endpoint '{name[:80]}' that {error}"
                continue
            found[name] = member._replace(drain=terminating)
    return FoundMembers(tuple(sorted(found.values())), problem)


def _order(each: Mapping[str, Any]) -> tuple[int, str]:
    """Order slices by address family and name, so that the same members follow from the same slices."""
    family = each.get("addressType")
    return _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES), str(each["metadata"]["name"])


def _serving(each: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield name, address, and whether it terminates, of each endpoint of a slice that serves."""
    if each.get("addressType") not in _FAMILIES:
        return
    for endpoint in each.get("endpoints") or ():
        addresses = endpoint.get("addresses") if isinstance(endpoint, dict) else None
        if not (isinstance(addresses, list) and addresses and isinstance(addresses[0], str)):
            continue
        conditions = endpoint.get("conditions") or {}
        ready = conditions.get("ready") is not False  # unknown means ready
        serving = conditions.get("serving")
        if not (ready if serving is None else serving):
            continue
        pod = endpoint.get("targetRef") or {}
        name = f"{pod['namespace']}/{pod['name']}" if pod.get("namespace") and pod.get("name") else addresses[0]
        yield name, addresses[0], bool(conditions.get("terminating"))


def _number(ports: Iterable[Mapping[str, Any]], wanted: str) -> int:
    """Return the number of the port that has a name or a number; 0 without one."""
    for port in ports:
        number = port.get("port")
        if isinstance(number, int) and wanted in (port.get("name"), str(number)):
            return number
    return 0


def _annotation(each: Mapping[str, Any], name: str) -> str:
    annotations = each["metadata"].get("annotations")
    return str(annotations.get(name) or "") if isinstance(annotations, dict) else ""
