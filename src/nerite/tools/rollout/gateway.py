"""The weights of a rollout as an ``HTTPRoute`` of the Kubernetes Gateway API, for versions in separate deployments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, Final

from nerite.cli.command import UsageError

_NAME: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PARTS: Final = 1000
"""Parts of one percent, so that weights, which are integers, also have fractions of a percent."""
_SERVICES: Final = ("baseline", "candidate")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status`` that print an ``HTTPRoute``."""
    group = parser.add_argument_group("Kubernetes Gateway API (docs/rollout-fleet.md)")
    group.add_argument(
        "--gateway-route", metavar="NAME", default="", help="print an HTTPRoute with the present weights"
    )
    group.add_argument("--gateway", metavar="NAME", default="", help="the Gateway that the route is attached to")
    for arm in _SERVICES:
        help_ = f"service of the {arm}, as in {arm}:8000"
        group.add_argument(f"--{arm}-service", metavar="NAME:PORT", default="", help=help_)
    group.add_argument("--namespace", metavar="NAME", default="default", help="of the route (default: default)")


def gateway_route(status: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the manifest of an ``HTTPRoute`` with the weights of a rollout. Raises ``UsageError``."""
    for flag, name in (("route", options.gateway_route), ("", options.gateway), ("namespace", options.namespace)):
        if not _NAME.fullmatch(name):
            where = "--namespace" if flag == "namespace" else f"--gateway-{flag}".rstrip("-")
            raise UsageError(f"{where} '{name}' is no name of Kubernetes: lower-case letters, digits and '-'")
    backends = []
    for arm in _SERVICES:
        given = getattr(options, f"{arm}_service")
        name, _, port = given.partition(":")
        if not _NAME.fullmatch(name) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--{arm}-service '{given}': write NAME:PORT")
        weight = round(status["arms"][arm]["weight"] * _PARTS)
        backends.append(f"        - name: {name}\n          port: {int(port)}\n          weight: {weight}")
    return f"""\
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {options.gateway_route}
  namespace: {options.namespace}
  annotations:
    nerite/rollout: "{status["id"]} {status["state"]}"
spec:
  parentRefs:
    - name: {options.gateway}
  rules:
    - backendRefs:
{chr(10).join(backends)}"""
