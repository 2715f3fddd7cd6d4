"""Actors around a process of Nerite: they start it on their node, say whether it is ready, and have it drain.

Requests go to the ports of the process. Nothing of them passes through the actor.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nerite.cluster.addresses import split_address
from nerite.cluster.settings import ClusterSettings
from nerite.llm.selection import RESERVED_GPUS
from nerite.ray.plan import PoolPlan
from nerite.ray.pool_servers import ServerView
from nerite.ray.ray_cluster import ray_module
from nerite.tools.up.command import FreePorts, nerite_program
from nerite.tools.up.follower import ask
from nerite.tools.up.local_plan import LocalProcess, awake, router_process, server_process
from nerite.tools.up.supervisor import Supervisor

GRACE: Final = 10.0
"""Seconds that a process may take to end beyond its own time for requests in progress."""
_ASK_SECONDS: Final = 2.0
_WAKE_SECONDS: Final = 600.0


class ProcessActor:
    """Keeps one process running; it is started again with backoff whenever it has ended."""

    _folder: tempfile.TemporaryDirectory[str]
    """Files of the process: of a server the state of its rollouts, of the router its members."""

    def __init__(self, process: LocalProcess, stop_seconds: float) -> None:
        self._process = process
        self._stop_seconds = stop_seconds
        self._changed = threading.Condition()
        self._starts = 0
        self._loop = asyncio.new_event_loop()
        self._supervisor = Supervisor([process], self._say, stop_seconds)
        threading.Thread(target=self._loop.run_until_complete, args=(self._supervisor.run(),), daemon=True).start()

    def _say(self, text: str) -> None:
        """Print what the supervisor says. Whatever changes, it says."""
        print(text, flush=True)
        with self._changed:
            self._starts += " has ended with " in text
            self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """Whether the process can serve."""
        return self._process.name in self._supervisor.ready

    def drain(self) -> None:
        """Have the process end after its requests."""
        ending = asyncio.run_coroutine_threadsafe(self._supervisor.remove(self._process.name), self._loop)
        ending.result(self._stop_seconds + GRACE)
        self._folder.cleanup()


class ServerActor(ProcessActor):
    """A server of a pool, on ports of its node that were free."""

    def __init__(self, plan: PoolPlan, name: str, standby: bool, stop_seconds: float) -> None:
        ray = ray_module()
        context = ray.get_runtime_context()
        self._node = str(context.get_node_id())
        self._digest = plan.digest
        self._folder = tempfile.TemporaryDirectory(prefix="nerite-ray-")
        if plan.bundle.get("GPU"):
            os.environ[RESERVED_GPUS] = f"{plan.bundle['GPU']:g}"
        if plan.engine_places_gpus:
            # Engines run as drivers of the same cluster. Ray hides the GPUs from a process that has reserved none.
            os.environ["RAY_ADDRESS"] = str(context.gcs_address)
            if not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
                del os.environ["CUDA_VISIBLE_DEVICES"]
        host = str(ray.util.get_node_ip_address())
        with FreePorts(host) as ports:
            process = server_process(
                plan.pool, name, ports.next, nerite_program(), standby=standby, host=host, state=self._folder.name
            )
        super().__init__(process, stop_seconds)

    def watch(self, seen: ServerView | None, seconds: float) -> ServerView:
        """Return what is known of the server as soon as it differs from ``seen``, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._view() != seen, seconds)
            return self._view()

    def _view(self) -> ServerView:
        process = self._process
        return ServerView(self.ready, process.standby, process.member, self._node, self._digest, self._starts)

    def wake(self) -> None:
        """Have a standby load its models."""
        if not self._process.standby:
            return
        server = awake(self._process)
        asyncio.run_coroutine_threadsafe(self._replace(server), self._loop).result(GRACE)
        host, port = split_address(server.address)
        if ask(host, port, "POST", "/v2/repository/wake", _WAKE_SECONDS) is None:
            self._loop.call_soon_threadsafe(self._supervisor.restart, server.name)

    async def _replace(self, server: LocalProcess) -> None:
        """Have a server that has been woken asked anew whether it is ready."""
        self._supervisor.replace(server)
        with self._changed:
            self._process = server
            self._changed.notify_all()


class RouterActor(ProcessActor):
    """The router, which reads its members from files that the controller has written by this actor."""

    def __init__(self, settings: ClusterSettings, digest: str, stop_seconds: float) -> None:
        self._written: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="nerite-ray-")
        self._digest = digest
        self._incarnation = uuid.uuid4().hex
        self._metrics = settings.router.metrics_port
        for pool in settings.pools:
            if pool.source.models:
                self._file(pool.name).write_text("")
        process = router_process(settings, lambda pool: str(self._file(pool)), nerite_program(), waits=False)
        super().__init__(process, stop_seconds)

    def _file(self, pool: str) -> Path:
        return Path(self._folder.name, f"{pool}.members")

    def write(self, pool: str, text: str, number: int) -> None:
        """Write the members of a pool, unless those of a larger number are written: calls may overtake each other."""
        with self._changed:
            if number <= self._written.get(pool, -1):
                return
            self._written[pool] = number
            new = self._file(pool).with_suffix(".new")
            new.write_text(text)
            os.replace(new, self._file(pool))

    def watch(self, seconds: float) -> tuple[str, bool, Mapping[str, Any]]:
        """Return which router this is, whether it is ready, and its report of the pools, after some seconds."""
        time.sleep(seconds)
        host, _ = split_address(self._process.address)
        report = ask(host, self._metrics, "GET", "/v2/pools", _ASK_SECONDS) or {}
        return self._incarnation, self.ready, report

    def digest(self) -> str:
        """Return what the router was made by."""
        return self._digest


def with_paths(settings: ClusterSettings) -> ClusterSettings:
    """Return settings whose model repositories are absolute paths, as they are the same on all nodes."""
    pools = tuple(
        replace(pool, source=replace(pool.source, models=os.path.abspath(pool.source.models)))
        if pool.source.models and "://" not in pool.source.models
        else pool
        for pool in settings.pools
    )
    return replace(settings, path=os.path.abspath(settings.path), pools=pools)
