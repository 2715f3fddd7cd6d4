"""Objects of Kubernetes that a cluster file names: the service whose endpoints are members, the workload to scale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from nerite.config.mistake import nearest

_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PORT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_WORKLOAD: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_GROUPS: Final[Mapping[str, str]] = {
    "deployment": "apis/apps/v1",
    "statefulset": "apis/apps/v1",
    "leaderworkerset": "apis/leaderworkerset.x-k8s.io/v1",
}
"""Kinds that can be scaled, with the path of their API group."""


class ServiceReference(NamedTuple):
    """A service of Kubernetes, and one of its ports."""

    namespace: str
    """Empty: the namespace of the process itself."""
    service: str
    port: str
    """Name of the port, or the number on which the pods listen."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}:{self.port}".removeprefix("/")


class ScaleTarget(NamedTuple):
    """A workload of Kubernetes that has a number of replicas."""

    namespace: str
    """Empty: the namespace of the process itself."""
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.name}".removeprefix("/")

    def scale_path(self, own_namespace: str) -> str:
        """Return the path of its subresource ``scale``."""
        namespace = self.namespace or own_namespace
        return f"/{_GROUPS[self.kind]}/namespaces/{namespace}/{self.kind}s/{self.name}/scale"


def service_of(value: object) -> ServiceReference:
    """Return the service that a text names. Raises ``ValueError`` with what it must be."""
    text = value if isinstance(value, str) else ""
    path, _, port = text.rpartition(":")
    namespace, slash, service = path.rpartition("/")
    known = (_LABEL.fullmatch(namespace) or not slash) and _LABEL.fullmatch(service)
    number = port.isascii() and port.isdecimal()
    if not known or not (0 < int(port) < 65536 if number and len(port) < 6 else _PORT_NAME.fullmatch(port)):
        raise ValueError(
            f"must be NAMESPACE/SERVICE:PORT, as in models/nerite:http, or SERVICE:PORT, not '{str(value)[:80]}'"
        )
    return ServiceReference(namespace, service, port)


def scale_target_of(value: object) -> ScaleTarget:
    """Return the workload that a text names. Raises ``ValueError`` with what it must be."""
    parts = value.split("/") if isinstance(value, str) else []
    namespaced = len(parts) == 3
    namespace, kind, name = parts if namespaced else ("", *parts) if len(parts) == 2 else ("", "", "")
    if name and kind not in _GROUPS and (meant := nearest(kind, tuple(_GROUPS))):
        raise ValueError(f"names the kind '{kind[:80]}'. Did you mean {meant}?")
    if kind not in _GROUPS or not _WORKLOAD.fullmatch(name) or (namespaced and not _LABEL.fullmatch(namespace)):
        raise ValueError(
            f"must be KIND/NAME or NAMESPACE/KIND/NAME with a kind of {', '.join(_GROUPS)}, as in deployment/nerite, "
            f"not '{str(value)[:80]}'"
        )
    return ScaleTarget(namespace, kind, name)
