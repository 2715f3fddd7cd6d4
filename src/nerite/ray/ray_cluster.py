"""What is asked of Ray: connections, nodes, actors with their placement groups. Ray is imported here only.

An actor has a name in the namespace of its cluster, and so has the placement group that it runs in: whoever connects
finds them again.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from nerite.core.errors import NotInstalled, Unavailable
from nerite.observability.log import log
from nerite.ray.pool_servers import NodeView

INSTALL: Final = "pip install 'nerite[ray]'"
_THREADS: Final = 64
"""Calls that an actor answers at the same time."""


def ray_module(name: str = "ray") -> Any:
    """Return a module of Ray. Raises ``NotInstalled`` with how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(f"unable to import {name} ({error}): {INSTALL}, with the version of the cluster") from None


def connect(namespace: str, address: str = "") -> None:
    """Connect this process to a cluster of Ray. ``address``: as for ``ray.init``; empty: that of this machine.

    Raises ``NotInstalled``, or ``Unavailable`` without a cluster.
    """
    ray = ray_module()
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = str(error).strip().split("\n")[0]
        raise Unavailable(
            f"no cluster of Ray can be reached ({text}). Run this on a node of the cluster, start one with: "
            "ray start --head, or name it with --address"
        ) from None


class RayCluster:
    """The actors of one cluster file. The process is connected to Ray."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._ray = ray_module()
        self._groups = ray_module("ray.util.placement_group")
        self._strategies = ray_module("ray.util.scheduling_strategies")
        self.errors = ray_module("ray.exceptions")

    @property
    def node(self) -> str:
        """Id of the node of this process."""
        return str(self._ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, NodeView]:
        """Return the nodes that are alive, by their ids."""
        draining = self._draining()
        return {
            str(node["NodeID"]): NodeView(
                node["Resources"], str(node["NodeManagerAddress"]), draining.get(str(node["NodeID"]))
            )
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def _draining(self) -> dict[str, float]:
        """Return the seconds until each draining node ends. Ray says so to its own libraries only."""
        try:
            state = ray_module("ray._private.state").state
            found = state.get_draining_nodes()
        except (AttributeError, NotInstalled):
            return {}  # of another version of Ray: its nodes end without notice
        now = time.time()
        return {str(node): deadline / 1000 - now if deadline else math.inf for node, deadline in found.items()}

    def names(self) -> list[str]:
        """Return the names of the actors that there are, those included that Ray starts again."""
        found = self._ray.util.list_named_actors(all_namespaces=True)
        return sorted(each["name"] for each in found if each["namespace"] == self._namespace)

    def find(self, name: str) -> Any:
        """Return the handle of an actor; None if there is none."""
        try:
            return self._ray.get_actor(name, namespace=self._namespace)
        except ValueError:
            return None

    def create(
        self, kind: type, name: str, *arguments: object, bundle: Mapping[str, float] | None = None, node: str = "",
        pinned: bool = False,
    ) -> Any:  # fmt: skip
        """Create an actor that Ray starts again whenever it is lost; return its handle.

        It runs in a placement group of its own with the resources of ``bundle``, on ``node`` if there is room; or, if
        ``pinned``, on this node only, without resources.
        """
        options: dict[str, Any] = {"num_cpus": 0}
        if bundle is not None:
            self._remove_group(name)
            group = self._groups.placement_group(
                [dict(bundle)], strategy="STRICT_PACK", name=self._group(name), lifetime="detached",
                _soft_target_node_id=node or None,
            )  # fmt: skip
            custom = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU", "memory")}
            options = {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "memory": bundle.get("memory", 0),
                "resources": custom,
                "scheduling_strategy": self._strategies.PlacementGroupSchedulingStrategy(group, 0),
            }
        elif pinned:
            options["scheduling_strategy"] = self._strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self._ray.remote(kind).options(
            name=name, namespace=self._namespace, lifetime="detached", max_restarts=-1, max_concurrency=_THREADS,
            **options,
        )  # fmt: skip
        return actor.remote(*arguments)

    def kill(self, name: str) -> None:
        """End an actor for good, and free the resources of its placement group."""
        handle = self.find(name)
        if handle is not None:
            self._ray.kill(handle, no_restart=True)
        self._remove_group(name)

    def _group(self, name: str) -> str:
        return f"{self._namespace}/{name}"

    def _remove_group(self, name: str) -> None:
        if name in self.groups():
            self._groups.remove_placement_group(self._groups.get_placement_group(self._group(name)))

    def groups(self) -> list[str]:
        """Return the names of the actors whose placement groups there are."""
        prefix = self._group("")
        table = self._groups.placement_group_table().values()
        return [
            about["name"].removeprefix(prefix)
            for about in table
            if about["state"] != "REMOVED" and about["name"].startswith(prefix)
        ]

    def done(self, references: list[Any], seconds: float) -> list[Any]:
        """Wait until one of the calls has ended, at most for the seconds; return those that have."""
        if not references:
            time.sleep(seconds)
            return []
        self._ray.wait(references, num_returns=1, timeout=seconds)
        found, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        return list(found)

    def result(self, reference: Any, seconds: float | None = None) -> Any:
        """Return what a call has returned, and raise what it has raised."""
        return self._ray.get(reference, timeout=seconds)


def log_failure(act: Callable[[], object], what: str) -> None:
    """Do something whose failure is logged and no more."""
    try:
        act()
    except Exception as error:
        log.warning(f"{what}: {error}")
