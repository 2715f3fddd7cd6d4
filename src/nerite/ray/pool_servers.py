"""Which servers of a pool to create, wake and stop in Ray, and on which nodes. Pure.

Ray starts an actor again whose process or node is lost. Decided here is what Ray does not know: how many servers there
should be, which nodes drain, and that a server leaves only when another one is ready in its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from enum import StrEnum, auto
from typing import Final, NamedTuple

from nerite.ray.plan import PoolPlan
from nerite.scheduling.backoff import ExponentialBackoff
from nerite.tools.up.replicas import PoolReplicas, ReplicaStep

_FIRST_DELAY: Final = 0.5
_LONGEST_DELAY: Final = 30.0
"""Seconds before an actor that has ended is created again, doubled each time until it was ready."""
_PATIENCE: Final = 15.0
"""Seconds that a new server may wait for a node before the one that it replaces makes room."""
_MARGIN: Final = 5.0
"""Seconds before a node ends by which its servers have ended."""


class ServerView(NamedTuple):
    """What is known of a server."""

    ready: bool = False
    """It can serve, or be woken."""
    standby: bool = False
    member: str = ""
    """Its line in a members file; empty while it has no address."""
    node: str = ""
    """Id of its node; empty while it waits for one."""
    digest: str = ""
    restarts: int = 0
    """How often its process has ended."""


class NodeView(NamedTuple):
    """What is known of a node that is alive."""

    resources: Mapping[str, float]
    address: str = ""
    ends_in: float | None = None
    """Seconds until it ends, for a node that drains, infinite if nobody said when; None: it does not drain."""


class ServerStep(StrEnum):
    """What is to be done with a server."""

    CREATE = auto()
    CREATE_STANDBY = auto()
    WAKE = auto()
    STOP = auto()
    """Let its requests end, and remove it."""


class ServerOrder(NamedTuple):
    """A step for one server."""

    step: ServerStep
    name: str
    node: str = ""
    """Id of the node that it should be created on, if there is room; empty: any."""


class PoolServers:
    """The servers of one pool in Ray."""

    def __init__(self, plan: PoolPlan, present: Mapping[str, bool], drain_seconds: float) -> None:
        """``present``: servers that are there already, and whether they stand by.

        ``drain_seconds``: how long the requests of a server may take to end.
        """
        self._plan = plan
        self._drain_seconds = drain_seconds
        self._standbys = {name for name, standby in present.items() if standby}
        members = [name for name in present if name not in self._standbys]
        self._replicas = PoolReplicas(plan.pool.name, members, sorted(self._standbys))
        self._backoffs: dict[str, ExponentialBackoff] = {}
        """Of actors that have ended before they were ready."""
        self._due: dict[str, float] = {}
        """When they are created again."""
        self._unplaced_since: float | None = None
        self._replacing = ""
        """The server whose settings are old that is replaced now."""

    def decide(
        self,
        now: float,
        wanted: int,
        servers: Mapping[str, ServerView],
        nodes: Mapping[str, NodeView],
        listed: Collection[str],
    ) -> list[ServerOrder]:
        """Return what to do now. A server that should be and is not is created again and again.

        ``servers`` are those whose actors there are, those that end apart. ``listed``: members that routers know.
        """
        able = {name: view.standby for name, view in servers.items() if view.ready and view.node in nodes}
        ready = {name for name, standby in able.items() if standby == (name in self._standbys)}
        for name in ready:
            self._forget_failures(name)
        unplaced = any(name in self._replicas.names and not view.node for name, view in servers.items())
        if not unplaced:
            self._unplaced_since = None
        elif self._unplaced_since is None:
            self._unplaced_since = now
        replaced, hurried = self._old(now, servers, nodes)
        orders = []
        for step, name in self._replicas.orders(wanted, self._plan.warm, ready, listed, replaced, hurried):
            if step is ReplicaStep.STAND_BY:
                self._standbys.add(name)
            elif step is ReplicaStep.WAKE:
                self._standbys.discard(name)
            elif step is ReplicaStep.STOP:
                self._standbys.discard(name)
                self._forget_failures(name)
                if name in servers:
                    orders.append(ServerOrder(ServerStep.STOP, name))
        # An actor that Ray has started again is as it was created, though it was woken since.
        orders += [
            ServerOrder(ServerStep.WAKE, name)
            for name, standby in able.items()
            if standby and name in self._replicas.names - self._standbys
        ]
        return [*orders, *self._missing(now, servers, nodes)]

    def _old(
        self, now: float, servers: Mapping[str, ServerView], nodes: Mapping[str, NodeView]
    ) -> tuple[set[str], set[str]]:
        """Return the servers to be replaced, and those of them that leave at once."""
        replaced, hurried = set(), set()
        for name, view in servers.items():
            ends_in = nodes[view.node].ends_in if view.node in nodes else None
            if ends_in is not None:
                replaced.add(name)
                if ends_in < self._drain_seconds + _MARGIN:
                    hurried.add(name)
        changed = sorted(name for name, view in servers.items() if view.digest not in ("", self._plan.digest))
        if self._replacing not in changed:
            self._replacing = changed[0] if changed else ""
        if self._replacing:
            replaced.add(self._replacing)
            if self._unplaced_since is not None and now - self._unplaced_since > _PATIENCE:
                hurried.add(self._replacing)
        return replaced, hurried

    def _missing(
        self, now: float, servers: Mapping[str, ServerView], nodes: Mapping[str, NodeView]
    ) -> list[ServerOrder]:
        orders = []
        load = Counter(view.node for view in servers.values())
        for name in sorted(self._replicas.names - servers.keys()):
            if now < self._due.get(name, now):
                continue
            node = self._node(load, nodes)
            load[node] += 1
            step = ServerStep.CREATE_STANDBY if name in self._standbys else ServerStep.CREATE
            orders.append(ServerOrder(step, name, node))
        return orders

    def _node(self, load: Mapping[str, int], nodes: Mapping[str, NodeView]) -> str:
        """Return the node with the fewest servers of the pool that is large enough; empty if there is none."""
        bundle = self._plan.bundle
        fitting = [
            name
            for name, node in nodes.items()
            if node.ends_in is None and all(node.resources.get(each, 0) >= amount for each, amount in bundle.items())
        ]
        return min(fitting, key=lambda name: (load.get(name, 0), name), default="")

    def ended(self, name: str, now: float) -> None:
        """Note that an actor has ended for good."""
        backoff = self._backoffs.setdefault(
            name, ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY, math.inf, at_once=False)
        )
        self._due[name] = now + backoff.failed(now)

    def _forget_failures(self, name: str) -> None:
        self._backoffs.pop(name, None)
        self._due.pop(name, None)

    def lines(self, servers: Mapping[str, ServerView], nodes: Mapping[str, NodeView]) -> list[str]:
        """Return the lines of the members file: servers that are ready, on nodes that are alive."""
        found = []
        for name in self._replicas.joined:
            view = servers.get(name)
            if view is not None and view.ready and view.member and view.node in nodes:
                found.append(view.member)
        return found
