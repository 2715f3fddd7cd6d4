"""Follows what the router wants of its pools: starts, wakes and stops servers of this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

from nerite.cluster.addresses import split_address
from nerite.cluster.settings import ClusterSettings, PoolSettings
from nerite.core.work_loop import WorkLoop
from nerite.tools.up.local_plan import LocalProcess, awake
from nerite.tools.up.replicas import PoolReplicas, ReplicaOrder, ReplicaStep
from nerite.tools.up.supervisor import Supervisor

_INTERVAL: Final = 0.25
_ASK_SECONDS: Final = 5.0
_WAKE_SECONDS: Final = 600.0
"""Time that the models of a woken server may take to load."""

MakeServer = Callable[[PoolSettings, str, bool], LocalProcess]
"""Returns the process of a pool's server by its name; True: one that stands by."""


class PoolFollower:
    """Keeps as many servers of each pool as the router wants."""

    def __init__(
        self,
        settings: ClusterSettings,
        plan: Sequence[LocalProcess],
        supervisor: Supervisor,
        make: MakeServer,
        members_file: Callable[[str], Path],
        say: Callable[[str], None],
    ) -> None:
        """``plan`` has the processes that were started; ``members_file`` returns the file that the router reads."""
        router = settings.router
        host = "127.0.0.1" if router.address in ("0.0.0.0", "::") else router.address
        self._router = (host, router.metrics_port)
        self._pools = {pool.name: pool for pool in settings.pools if pool.scaling is not None and pool.source.models}
        self._servers = {process.name: process for process in plan if process.pool in self._pools}
        self._replicas = {name: self._begin(name) for name in self._pools}
        self._supervisor = supervisor
        self._make = make
        self._members_file = members_file
        self._say = say
        self._loop = WorkLoop("autoscaling", "servers of this machine")
        self._lines: dict[str, str] = {}
        """The members file of each pool, as it was written last."""
        self._tasks: set[asyncio.Task[None]] = set()

    def _begin(self, pool: str) -> PoolReplicas:
        servers = [process for process in self._servers.values() if process.pool == pool]
        return PoolReplicas(
            pool, [each.name for each in servers if not each.standby], [each.name for each in servers if each.standby]
        )

    async def run(self) -> None:
        """Follow until it is cancelled. Nothing happens while the router does not answer."""
        while self._pools:
            await asyncio.sleep(_INTERVAL)
            report = await asyncio.to_thread(ask, *self._router, "GET", "/v2/pools", _ASK_SECONDS)
            for pool in [] if report is None else report.get("pools", []):
                unit = f"pool '{pool['name']}'"
                if pool["name"] in self._pools and "wanted" in pool and self._loop.admits(unit):
                    with self._loop.step(unit):
                        self._follow(pool)

    def _follow(self, report: Mapping[str, Any]) -> None:
        """Do what follows for one pool. Raises what an order has raised, after the others were carried out."""
        name = report["name"]
        replicas = self._replicas[name]
        listed = {member["name"] for member in report["members"]}
        orders = replicas.orders(report["wanted"], report["warm"], self._supervisor.ready, listed)
        failed: Exception | None = None
        for order in orders:
            try:
                self._carry_out(self._pools[name], order, report["reason"])
            except Exception as error:
                failed = error
                if order.step in (ReplicaStep.START, ReplicaStep.STAND_BY):
                    replicas.lost(order.name)
        lines = "".join(f"{self._servers[each].member}\n" for each in replicas.joined)
        if lines != self._lines.get(name):
            file = self._members_file(name)
            written = file.with_suffix(".new")
            written.write_text(lines)
            os.replace(written, file)
            self._lines[name] = lines
        if failed is not None:
            raise failed

    def _carry_out(self, pool: PoolSettings, order: ReplicaOrder, reason: str) -> None:
        step, name = order
        if step in (ReplicaStep.START, ReplicaStep.STAND_BY):
            server = self._servers[name] = self._make(pool, name, step is ReplicaStep.STAND_BY)
            if step is ReplicaStep.START:
                self._say(f"starting {name}: {reason}")
            self._supervisor.add(server)
        elif step is ReplicaStep.WAKE:
            self._say(f"waking {name}: {reason}")
            server = self._servers[name] = awake(self._servers[name])
            self._supervisor.replace(server)
            self._keep(self._wake(server))
        elif step is ReplicaStep.LEAVE:
            self._say(f"{name} leaves the pool: {reason}")
        elif step is ReplicaStep.STOP:
            del self._servers[name]
            self._keep(self._supervisor.remove(name))

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self, server: LocalProcess) -> None:
        host, port = split_address(server.address)
        woken = await asyncio.to_thread(ask, host, port, "POST", "/v2/repository/wake", _WAKE_SECONDS)
        if woken is None and server.name in self._servers:
            self._say(f"{server.name} could not be woken and is started again")
            self._supervisor.restart(server.name)


def ask(host: str, port: int, method: str, path: str, seconds: float) -> dict[str, Any] | None:
    """Return the JSON object that a server answers with; None without such an answer. Blocks."""
    connection = HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        found = json.loads(response.read() or b"{}")
        return found if response.status == 200 and isinstance(found, dict) else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
