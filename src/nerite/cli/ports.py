"""No two services on one address and port."""

from __future__ import annotations

from typing import NamedTuple

from nerite.cli.usage_error import UsageError
from nerite.config.options import ServerOptions


class Service(NamedTuple):
    """A service that listens, under the name that messages give it."""

    name: str
    address: str
    port: int
    allowed: tuple[int, int] | None = None
    """The ports it leaves to the other services."""


def services(options: ServerOptions) -> list[Service]:
    """Return the services that are switched on, in the order in which they are compared."""
    http, grpc, metrics = options.http, options.grpc, options.metrics
    sagemaker, vertex = options.sagemaker, options.vertex
    every = (
        (http.enabled, Service("HTTP", http.address, http.port)),
        (grpc.enabled, Service("GRPC", grpc.address, grpc.port)),
        (metrics.enabled, Service("metrics", metrics.address, metrics.port)),
        (
            sagemaker.enabled,
            Service("SageMaker", sagemaker.address, sagemaker.port, sagemaker.safe_port_range),
        ),
        (vertex.enabled, Service("Vertex AI", vertex.address, vertex.port)),
    )
    return [service for enabled, service in every if enabled]


def check_ports(options: ServerOptions) -> None:
    """Raise ``UsageError`` for the first two services in each other's way. Port 0 is in nobody's."""
    found = services(options)
    for index, one in enumerate(found):
        # A range speaks about services before and after; without one, each pair is looked at once.
        for other in found if one.allowed else found[index + 1 :]:
            if other is one:
                continue
            if one.allowed and not one.allowed[0] <= other.port <= one.allowed[1]:
                first, last = one.allowed
                raise UsageError(
                    f"The server cannot listen to {other.name} requests at port {other.port}, "
                    f"allowed port range is [{first}, {last}]"
                )
            if other.address == one.address and one.port == other.port != 0:
                raise UsageError(
                    f"The server cannot listen to {one.name} requests and {other.name} requests at the same "
                    f"address and port {one.address}:{one.port}"
                )
