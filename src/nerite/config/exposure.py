"""Which ports allow anybody to command the server: open to other machines, without a key or a client certificate."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from nerite.config.options import ServerOptions

LOAD: Final = "model-repository"
"""The category of what loads models."""
_HTTP: Final = "http-restricted-api"
_GRPC: Final = "grpc-restricted-protocol"
_RIGHTS: Final = {
    LOAD: "load and unload models, and so run code as the user of the server",
    "shared-memory": "register shared memory",
    "trace": "change what is traced",
    "logging": "change what is logged",
}
"""What the categories that change the server allow. The worst first."""


class OpenPort(NamedTuple):
    """A port where the server can be commanded without a key."""

    service: str
    address: str
    port: int
    flag: str
    """Puts categories behind a key there."""
    categories: tuple[str, ...]
    """Those that need no key there."""

    def __str__(self) -> str:
        """Return service and address, for people. A port 0 is not known yet."""
        return f"{self.service} ({self.address}{f':{self.port}' if self.port else ''})"


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches what listens at ``address``: an IP address, or localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_ports(options: ServerOptions) -> list[OpenPort]:
    """Return the ports where anybody may command the server, with what may be commanded there."""
    commands = [
        category
        for category, offered in (
            (LOAD, options.repository.control_mode == "explicit"),
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
    """Return what anybody may do who reaches one of the ports."""
    listed = "; ".join(_RIGHTS[category] for category in _categories(ports))
    return f"anybody who reaches {' or '.join(map(str, ports))} may {listed}"


def remedy(ports: Sequence[OpenPort]) -> str:
    """Return how to close the ports."""
    flags = []
    for flag in dict.fromkeys(port.flag for port in ports):
        categories = _categories([port for port in ports if port.flag == flag])
        flags.append(f"--{flag}={','.join(categories)}:HEADER=@KEYFILE")
    return f"Have it need a key ({' '.join(flags)}), or listen for this machine alone (--address=127.0.0.1)."


def _categories(ports: Sequence[OpenPort]) -> list[str]:
    there = {category for port in ports for category in port.categories}
    return [category for category in _RIGHTS if category in there]
