"""The controller: an actor that keeps the servers and the router of a cluster file running in Ray.

It remembers nothing that it could not find out again: Ray starts it again where it will, and it takes over the actors
that there are. While it is gone, servers and routers go on.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from nerite.observability.log import log
from nerite.ray.actors import GRACE, RouterActor, ServerActor
from nerite.ray.plan import CONTROLLER, ROUTER, PoolPlan, RayPlan, namespace_of, pool_of
from nerite.ray.pool_servers import NodeView, PoolServers, ServerOrder, ServerStep, ServerView
from nerite.ray.ray_cluster import RayCluster, log_failure

_TICK: Final = 0.25
_WATCH_SECONDS: Final = 10.0
"""Time after which an actor that has nothing new is asked again."""
_ADOPT_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 5.0
"""Time after which a lost router is looked for again."""
_REMEMBERED: Final = 2.0
"""Seconds for which a server that has left may still be known to routers that are told of it apart."""


class _RouterView(NamedTuple):
    """What is known of the router."""

    incarnation: str = ""
    """Differs whenever its actor was started again; empty: it does not answer."""
    ready: bool = False
    report: Mapping[str, Any] = MappingProxyType({})
    """Its report of the pools."""


class _Server:
    """A server whose actor there is."""

    def __init__(self, handle: Any, view: ServerView) -> None:
        self.handle = handle
        self.view = view
        self.watching: Any = None
        """The call that returns what has changed; None: it has failed, and is due at ``again``."""
        self.again = 0.0


class _Pool:
    """A pool with what was decided for it."""

    def __init__(self, plan: PoolPlan, present: Mapping[str, bool], drain_seconds: float) -> None:
        self.plan = plan
        self.name = plan.pool.name
        self.servers = PoolServers(plan, present, drain_seconds)
        self.wanted = plan.least
        self.lines: list[str] | None = None
        self.published: dict[str, float] = {}
        """When servers were last among the members."""


class Controller:
    """Keeps everything running, in a thread; its methods say what there is."""

    def __init__(self, plan: RayPlan) -> None:
        self._plan = plan
        self._cluster = RayCluster(namespace_of(plan.name))
        self._stop_seconds = plan.settings.router.exit_timeout + GRACE
        self._servers: dict[str, _Server] = {}
        self._ending: dict[str, tuple[Any, float]] = {}
        """Servers that drain: the call that returns when they have, and when that takes too long."""
        self._pools: list[_Pool] = []
        self._nodes: dict[str, NodeView] = {}
        self._router: Any = None
        self._router_watching: Any = None
        self._router_again = 0.0
        self._router_view = _RouterView()
        self._changed = threading.Condition()
        self._number = 0
        """Counts the changes of members."""
        threading.Thread(target=self._run, daemon=True).start()

    # What others ask

    def digest(self) -> str:
        """Return what the plan is known by."""
        return self._plan.digest

    def members(self, pool: str, seen: int, seconds: float) -> tuple[int, list[str]]:
        """Return the lines of a pool's members as soon as something has changed since ``seen``, or after some seconds.

        Raises ``LookupError`` for an unknown pool.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pools and self._number != seen, seconds)
            if self._pools and pool not in [each.name for each in self._pools]:
                raise LookupError(f"{self._plan.name} has no pool '{pool}' with models")
            lines = next((each.lines for each in self._pools if each.name == pool), None)
            return self._number, lines or []

    def report(self) -> dict[str, Any]:
        """Return the state of everything."""
        pools = [
            {
                "name": pool.name,
                "wanted": pool.wanted,
                "ready": len(pool.lines or ()),
                "servers": {name: self._text(pool.plan, view) for name, view in sorted(self._views(pool.name).items())},
            }
            for pool in list(self._pools)
        ]
        ready = bool(pools) and all(self._complete(pool) for pool in list(self._pools))
        return {
            "ready": ready and (self._router_view.ready or not self._plan.router_node),
            "pools": pools,
            "router": "" if not self._plan.router_node else "ready" if self._router_view.ready else "not ready",
            "ending": sorted(self._ending),
        }

    def _views(self, pool: str) -> dict[str, ServerView]:
        """Return the servers of a pool by their names. Any thread may ask."""
        return {name: server.view for name, server in list(self._servers.items()) if pool_of(name) == pool}

    def _complete(self, pool: _Pool) -> bool:
        """Return whether a pool has as many members as are wanted, all with the settings of the file."""
        views = self._views(pool.name).values()
        current = all(view.digest in ("", pool.plan.digest) for view in views)
        return current and len(pool.lines or ()) >= pool.wanted

    def _text(self, plan: PoolPlan, view: ServerView) -> str:
        """Return the state of a server for people."""
        node = self._nodes.get(view.node)
        if node is None:
            asked = ", ".join(f"{amount:g} {name}" for name, amount in plan.bundle.items())
            return f"waits for a node with {asked}"
        state = ("stands by" if view.standby else "ready") if view.ready else "not ready"
        draining = ", which drains" if node.ends_in is not None else ""
        ended = f", started again {view.restarts} times" if view.restarts else ""
        return f"{state} at {view.member.partition(' ')[0]} on node {view.node[:8]} ({node.address}){draining}{ended}"

    # The thread

    def _run(self) -> None:
        while True:
            try:
                if not self._pools:
                    self._adopt()
                self._step()
            except Exception:
                log.error(f"the controller of {self._plan.name} goes on after: {traceback.format_exc()}")
                time.sleep(1)

    def _adopt(self) -> None:
        """Take over what is there already, and remove what no pool has."""
        names = self._cluster.names()
        for name in self._cluster.groups():
            if name not in names:
                self._cluster.kill(name)
        handles = {name: self._cluster.find(name) for name in names if name not in (CONTROLLER, ROUTER)}
        asked = {name: handle.watch.remote(None, 0) for name, handle in handles.items() if handle is not None}
        plans = {plan.pool.name: plan for plan in self._plan.pools}
        deadline = time.monotonic() + _ADOPT_SECONDS
        for name, reference in asked.items():
            view = ServerView()
            try:
                view = self._cluster.result(reference, max(0.0, deadline - time.monotonic()))
            except (self._cluster.errors.RayActorError, self._cluster.errors.GetTimeoutError):
                log.warning(f"{name} does not answer yet")
            self._servers[name] = _Server(handles[name], view)
            if pool_of(name) not in plans:
                self._stop(name)
        pools = []
        for plan in plans.values():
            present = {name: view.standby for name, view in self._views(plan.pool.name).items()}
            pools.append(_Pool(plan, present, self._stop_seconds))
        with self._changed:
            self._pools = pools

    def _step(self) -> None:
        """Wait for news a moment, and act on all there are."""
        now = time.monotonic()
        self._watch(now)
        pending = {server.watching: name for name, server in self._servers.items() if server.watching is not None}
        others = [reference for reference, _ in self._ending.values()]
        if self._router_watching is not None:
            others.append(self._router_watching)
        done = set(self._cluster.done([*pending, *others], _TICK))
        self._nodes = self._cluster.nodes()
        now = time.monotonic()
        for reference in done & pending.keys():
            self._take(pending[reference], reference, now)
        for name, (reference, deadline) in list(self._ending.items()):
            if reference in done or now > deadline:
                self._cluster.kill(name)
                del self._ending[name]
        self._follow_router(done, now)
        for pool in self._pools:
            self._decide(pool, now)

    def _watch(self, now: float) -> None:
        for server in self._servers.values():
            if server.watching is None and now >= server.again:
                server.watching = server.handle.watch.remote(server.view, _WATCH_SECONDS)

    def _take(self, name: str, reference: Any, now: float) -> None:
        """Take what a server has answered; one that does not answer is not ready."""
        server = self._servers[name]
        server.watching = None
        try:
            server.view = self._cluster.result(reference)
        except self._cluster.errors.RayError as error:
            log.warning(f"{name} does not answer: {str(error).strip().splitlines()[0][:200]}")
            server.view = ServerView(standby=server.view.standby, digest=server.view.digest)
            server.again = now + _TICK
            if self._cluster.find(name) is None:
                self._cluster.kill(name)
                del self._servers[name]
                for pool in self._pools:
                    if pool.name == pool_of(name):
                        pool.servers.ended(name, now)

    def _decide(self, pool: _Pool, now: float) -> None:
        reports: Mapping[str, Any] = {each["name"]: each for each in self._router_view.report.get("pools", ())}
        report = reports.get(pool.name, {})
        pool.wanted = report.get("wanted", pool.wanted)
        listed = {member["name"] for member in report.get("members", ())}
        listed |= {name for name, when in pool.published.items() if now - when < _REMEMBERED}
        for order in pool.servers.decide(now, pool.wanted, self._views(pool.name), self._nodes, listed):
            self._carry_out(pool, order, now)
        views = self._views(pool.name)
        lines = pool.servers.lines(views, self._nodes)
        pool.published |= {name: now for name in views if views[name].member in lines}
        pool.published = {name: when for name, when in pool.published.items() if now - when < _REMEMBERED}
        if lines != pool.lines:
            with self._changed:
                pool.lines = lines
                self._number += 1
                self._changed.notify_all()
            self._write(pool)

    def _carry_out(self, pool: _Pool, order: ServerOrder, now: float) -> None:
        name = order.name
        if order.step is ServerStep.STOP:
            self._stop(name)
        elif order.step is ServerStep.WAKE:
            server = self._servers[name]
            server.view = server.view._replace(ready=False)
            server.handle.wake.remote()
        elif name not in self._ending:  # the name is free once the server before has ended
            standby = order.step is ServerStep.CREATE_STANDBY
            try:
                handle = self._cluster.create(
                    ServerActor, name, pool.plan, name, standby, self._stop_seconds,
                    bundle=pool.plan.bundle, node=order.node,
                )  # fmt: skip
            except (ValueError, self._cluster.errors.RayError) as error:
                log.warning(f"{name} cannot be created: {error}")
                pool.servers.ended(name, now)
            else:
                log.info(f"{name} is created")
                self._servers[name] = _Server(handle, ServerView(standby=standby))

    def _stop(self, name: str) -> None:
        server = self._servers.pop(name)
        log.info(f"{name} drains")
        self._ending[name] = (server.handle.drain.remote(), time.monotonic() + self._stop_seconds + 2 * GRACE)

    # The router

    def _follow_router(self, done: Collection[Any], now: float) -> None:
        if not self._plan.router_node:
            return
        if self._router_watching is not None and self._router_watching in done:
            reference, self._router_watching = self._router_watching, None
            before = self._router_view.incarnation
            try:
                self._router_view = _RouterView(*self._cluster.result(reference))
            except self._cluster.errors.RayError:
                self._router_view = _RouterView()
                self._router_again = now + _TICK
                if self._cluster.find(ROUTER) is None:
                    self._router = None
            if self._router_view.incarnation not in ("", before):
                for pool in self._pools:
                    self._write(pool)
        if now >= self._router_again and self._router_watching is None:
            self._router_again = now + _RETRY_SECONDS
            if self._router is None:
                log_failure(self._find_router, "the router cannot be started")
            if self._router is not None:
                self._router_watching = self._router.watch.remote(2 * _TICK)
                self._router_again = now

    def _find_router(self) -> None:
        """Take over the router, or create it; one with other settings ends first."""
        digest, found = self._plan.router_digest, self._cluster.find(ROUTER)
        if found is not None and self._cluster.result(found.digest.remote(), 2 * GRACE) != digest:
            log_failure(
                partial(self._cluster.result, found.drain.remote(), self._stop_seconds + GRACE), "the router ends"
            )
            self._cluster.kill(ROUTER)
            found = None
        if found is None:
            found = self._cluster.create(
                RouterActor, ROUTER, self._plan.settings, digest, self._stop_seconds,
                node=self._plan.router_node, pinned=True,
            )  # fmt: skip
        self._router = found

    def _write(self, pool: _Pool) -> None:
        if self._router is not None and pool.lines is not None:
            text = "".join(f"{line}\n" for line in pool.lines)
            self._router.write.remote(pool.name, text, time.time_ns())
