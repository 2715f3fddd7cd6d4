"""EndpointSlices as Kubernetes writes them, for tests."""

from __future__ import annotations

from typing import Any

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def endpoint(
    address: str, pod: str = "", *, ready: bool | None = True, serving: bool | None = None, terminating: bool = False
) -> dict[str, Any]:
    """Return an endpoint."""
    reference = {"targetRef": {"kind": "Pod", "namespace": "default", "name": pod}} if pod else {}
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    return {"addresses": [address], "conditions": conditions, **reference}


def endpoint_slice(
    *endpoints: dict[str, Any],
    service: str = "models",
    name: str = "models-1",
    family: str = "IPv4",
    ports: dict[str, int] | None = None,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return an EndpointSlice of a service."""
    labels = {"kubernetes.io/service-name": service}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
        "addressType": family,
        "ports": [{"name": key, "port": port, "protocol": "TCP"} for key, port in (ports or PORTS).items()],
        "endpoints": list(endpoints),
    }
