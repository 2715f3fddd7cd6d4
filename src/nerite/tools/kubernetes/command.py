"""``nerite kubernetes render``: values of the Helm chart out of a cluster file."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nerite.admission.policy_file import open_policy
from nerite.cli.command import UsageError, complain, new_parser, show, status_of
from nerite.cluster.cluster_file import read_cluster
from nerite.core.errors import InvalidArgument
from nerite.tools.kubernetes.chart_values import PodOptions, chart_values, yaml_of
from nerite.tools.up.local_plan import rollout_lines

Value = TypeVar("Value")
_EPILOG: Final = """\
Prints the values with which the chart in deploy/helm/nerite runs what a cluster file describes: a Deployment and a
Service for each pool with models, and the router. --plan prints what that will be.

Examples:
  nerite kubernetes render cluster.toml --claim models --image registry.example.org/nerite > values.yaml
  helm upgrade --install platform deploy/helm/nerite --values values.yaml
  nerite kubernetes render cluster.toml --claim batch=large --claim models --gpus interactive=1 --plan
"""


def run(arguments: Sequence[str]) -> int:
    """Print values of the chart; return the exit status."""
    return status_of("nerite kubernetes", lambda: _run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite kubernetes", "Run a cluster file in Kubernetes by its Helm chart.", _EPILOG)
    parser.add_argument("action", choices=["render"], help="render: print values of the chart")
    parser.add_argument("file", metavar="FILE", help="cluster file, such as cluster.toml")
    parser.add_argument("--plan", action="store_true", help="print the objects that will be created, and no values")
    parser.add_argument("--image", default="", help="image of servers and router, which has nerite on its path")
    parser.add_argument(
        "--claim",
        metavar="[POOL=]NAME",
        action="append",
        default=[],
        help="persistent volume claim with the models of a pool, or of all pools",
    )
    parser.add_argument(
        "--gpus", metavar="[POOL=]COUNT", action="append", default=[], help="GPUs of each server of a pool, or of all"
    )
    parser.add_argument("--redis", metavar="URL", default="", help="Redis over which routers share quotas")
    parser.add_argument(
        "--scaled-by",
        choices=["keda", "router"],
        default="keda",
        help="who sets the replicas of pools with [pool.scaling] (default: keda, which asks the router)",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    settings = read_cluster(options.file)
    policy = ""
    if settings.router.policy_file:
        open_policy(settings.router.policy_file)  # its mistakes are told here
        policy = Path(settings.router.policy_file).read_text()
    raw = tomllib.loads(Path(options.file).read_text())
    claims, gpus = _by_pool("--claim", options.claim, str), _by_pool("--gpus", options.gpus, _count)
    pods = PodOptions(options.image, claims, gpus, options.redis, options.scaled_by)
    values = chart_values(settings, raw, policy, pods)
    for pool in settings.pools:
        if pool.resources is not None and pool.resources.custom:
            named = ", ".join(pool.resources.custom)
            complain(
                "nerite kubernetes", f"pool '{pool.name}': {named} in resources.custom are of Ray, and have no effect",
                "nodeSelector and affinity in the values of the chart choose the nodes",
            )  # fmt: skip
    if options.plan:
        show("\n".join([_plan(values), *rollout_lines(settings)]))
    else:
        show(yaml_of(values).rstrip("\n"))
    return 0


def _by_pool(flag: str, given: Sequence[str], read: Callable[[str], Value]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            name, value = "", text
        if name in found:
            raise UsageError(f"{flag} is given twice for {f'pool {name}' if name else 'all pools'}: remove one")
        found[name] = read(value)
    return found


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 4):
        raise InvalidArgument(f"--gpus must be [POOL=]COUNT with a number from 0 to 999, not '{text[:80]}'")
    return int(text)


def _plan(values: dict[str, Any]) -> str:
    """Return what the chart will create, a line for each workload; ``R`` stands for the name of the release."""
    router = values["router"]
    lines = [("R-nerite-router", f"{router.get('replicaCount', 2)} routers")]
    for pool in values["pools"]:
        scaling = pool.get("autoscaling")
        count = f"{scaling['minReplicas']} to {scaling['maxReplicas']}" if scaling else str(pool["replicaCount"])
        by = f", scaled by {scaling['by']}" if scaling else ""
        claim = pool.get("modelVolume", {}).get("persistentVolumeClaim", {}).get("claimName")
        models = f"the claim {claim}" if claim else pool["repository"]
        asked = {**pool.get("resources", {}).get("requests", {}), "GPUs": pool.get("numGpus")}
        each = ", ".join(f"{amount} {name}" for name, amount in asked.items() if amount)
        has = f" ({each} each)" if each else ""
        lines.append((f"R-nerite-{pool['name']}", f"{count} servers of {models}{has}{by}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"deployment and service {name:{width}}  {what}" for name, what in lines)
