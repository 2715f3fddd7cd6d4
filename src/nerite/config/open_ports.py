"""Finds the ports where any client may change the server: reachable from other machines, without key or certificate."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from nerite.config.options import ServerOptions

LOAD: Final = "model-repository"
"""Category of the endpoints that load models."""
_HTTP: Final = "http-restricted-api"
_GRPC: Final = "grpc-restricted-protocol"
_RIGHTS: Final = {
    LOAD: "load and unload models, and so run code as the user of the server",
    "shared-memory": "register shared memory",
    "trace": "change what is traced",
    "logging": "change what is logged",
}
"""What each category that changes the server allows, most dangerous first."""


class OpenPort(NamedTuple):
    """A port where clients can change the server without a key."""

    service: str
    address: str
    port: int
    flag: str
    """Flag that restricts categories of this port to clients with a key."""
    categories: tuple[str, ...]
    """Categories that need no key there."""

    def __str__(self) -> str:
        """Return service and address as text. Port 0 is left out: its number is not known yet."""
        return f"{self.service} ({self.address}{f':{self.port}' if self.port else ''})"


def is_loopback(address: str) -> bool:
    """Return whether ``address``, an IP address or localhost, can be reached from this machine only."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_ports(options: ServerOptions) -> list[OpenPort]:
    """Return the ports where any client may change the server, with the categories open there."""
    commands = [
        category
        for category, offered in (
            (LOAD, options.repository.control_mode in ("explicit", "demand")),
            ("shared-memory", options.device.allow_client_shared_memory),
            ("trace", True),
            ("logging", True),
        )
        if offered
    ]
    http, grpc, sagemaker = options.http, options.grpc, options.sagemaker
    ports = []
    if http.enabled and not http.tls.mutual:
        ports.append(OpenPort("HTTP", http.address, http.port, _HTTP, _unlocked(commands, http.restricted)))
    if grpc.enabled and not grpc.tls.mutual:
        ports.append(OpenPort("gRPC", grpc.address, grpc.port, _GRPC, _unlocked(commands, grpc.restricted)))
    if sagemaker.enabled and LOAD in commands:
        locked = _unlocked([LOAD], http.restricted)
        ports.append(OpenPort("SageMaker", sagemaker.address, sagemaker.port, _HTTP, locked))
    return [port for port in ports if port.categories and not is_loopback(port.address)]


def _unlocked(categories: Sequence[str], locked: Collection[str]) -> tuple[str, ...]:
    return tuple(category for category in categories if category not in locked)


def rights(ports: Sequence[OpenPort]) -> str:
    """Return a sentence that says what any client of the ports may do."""
    listed = "; ".join(_RIGHTS[category] for category in _categories(ports))
    return f"anyone who can connect to {' or '.join(map(str, ports))} may {listed}"


def remedy(ports: Sequence[OpenPort]) -> str:
    """Return how to close the ports."""
    flags = []
    for flag in dict.fromkeys(port.flag for port in ports):
        categories = _categories([port for port in ports if port.flag == flag])
        flags.append(f"--{flag}={','.join(categories)}:HEADER=@KEYFILE")
    return f"Require a key ({' '.join(flags)}), or accept only connections from this machine (--address=127.0.0.1)."


def _categories(ports: Sequence[OpenPort]) -> list[str]:
    there = {category for port in ports for category in port.categories}
    return [category for category in _RIGHTS if category in there]
