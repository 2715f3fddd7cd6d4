"""``nerite up``: starts what a cluster file describes on this machine, and stops it at the end."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from nerite.admission.policy_file import open_policy
from nerite.cli.command import new_parser, show, status_of
from nerite.cluster.cluster_file import read_cluster
from nerite.cluster.settings import ClusterSettings, PoolSettings
from nerite.core.errors import Unavailable
from nerite.rollouts.state_directory import state_directory
from nerite.tools.up.follower import PoolFollower
from nerite.tools.up.local_plan import (
    LocalProcess,
    local_plan,
    member_lines,
    plan_text,
    redis_address,
    rollout_lines,
    server_process,
)
from nerite.tools.up.supervisor import Supervisor

_EPILOG: Final = """\
Starts the servers of each pool that has models, a router in front of all pools, and a Redis if the file names one on
this machine that does not run and redis-server is installed. Ctrl-C stops everything; requests in progress end first.

Examples:
  nerite up cluster.toml
  nerite up cluster.toml --plan
"""
_GRACE: Final = 10.0
"""Seconds that a process may take to end beyond its own time for requests in progress."""


def run(arguments: Sequence[str]) -> int:
    """Run what a cluster file describes until a signal arrives; return the exit status."""
    return status_of("nerite up", lambda: _up(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite up", "Run a whole cluster file on this machine: servers and router.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="cluster file, such as cluster.toml")
    parser.add_argument("--plan", action="store_true", help="print the processes that would be started, and exit")
    return parser


def _up(options: argparse.Namespace) -> int:
    settings = read_cluster(options.file)
    if settings.router.policy_file:
        open_policy(settings.router.policy_file)  # its mistakes are told before anything starts
    with tempfile.TemporaryDirectory(prefix="nerite-up-") as folder:
        plan = _plan(settings, Path(folder))
        if options.plan:
            show("\n".join([plan_text(plan), *rollout_lines(settings)]))
            return 0
        _refuse_used_ports(settings)
        for pool, lines in member_lines(settings, plan).items():
            _members_file(Path(folder), pool).write_text("".join(f"{line}\n" for line in lines))
        return asyncio.run(_supervise(settings, plan, Path(folder)))


def _plan(settings: ClusterSettings, folder: Path) -> list[LocalProcess]:
    with FreePorts() as ports:
        return local_plan(
            settings,
            ports.next,
            lambda pool: str(_members_file(folder, pool)),
            partial(_state, settings),
            nerite=nerite_program(),
            redis=shutil.which("redis-server") or "",
            redis_answers=_answers(redis_address(settings)),
        )


def nerite_program() -> str:
    """Return the program ``nerite`` beside this Python."""
    return str(Path(sys.executable).with_name("nerite"))


def _state(settings: ClusterSettings, name: str) -> str:
    """Return where the state of a server's rollouts outlives it, whatever its ports are the next time."""
    return str(state_directory("", [settings.path], name, os.environ))


def _members_file(folder: Path, pool: str) -> Path:
    return folder / f"{pool}.members"


class FreePorts:
    """Ports that nobody uses. They stay reserved until the end, so that no two are the same."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def __enter__(self) -> FreePorts:
        self._sockets: list[socket.socket] = []
        return self

    def __exit__(self, *_error: object) -> None:
        for each in self._sockets:
            each.close()

    def next(self) -> int:
        """Return another port."""
        self._sockets.append(socket.create_server((self._host, 0), family=_family(self._host)))
        port: int = self._sockets[-1].getsockname()[1]
        return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _answers(address: tuple[str, int] | None) -> bool:
    if address is None:
        return False
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def _refuse_used_ports(settings: ClusterSettings) -> None:
    """Raise ``Unavailable`` if the router's ports are used, as by the same cluster that runs already."""
    router = settings.router
    host = "127.0.0.1" if router.address in ("0.0.0.0", "::") else router.address
    for key, port in (
        ("http-port", router.http_port), ("grpc-port", router.grpc_port), ("metrics-port", router.metrics_port),
    ):  # fmt: skip
        if port and _answers((host, port)):
            raise Unavailable(
                f"{settings.path}: router.{key} is {port}, which is used already: stop what listens there, such as "
                "another nerite up of this file, or choose another port"
            )


def _server(settings: ClusterSettings, pool: PoolSettings, name: str, standby: bool) -> LocalProcess:
    """Return the process of a further server."""
    with FreePorts() as ports:
        state = _state(settings, name)
        return server_process(pool, name, ports.next, nerite_program(), standby=standby, state=state)


async def _supervise(settings: ClusterSettings, plan: Sequence[LocalProcess], folder: Path) -> int:
    supervisor = Supervisor(plan, _say, settings.router.exit_timeout + _GRACE)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop)
    follower = PoolFollower(
        settings, plan, supervisor, partial(_server, settings), partial(_members_file, folder), _say
    )
    following = loop.create_task(follower.run())
    try:
        return 0 if await supervisor.run() else 1
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _say(text: str) -> None:
    print(text, flush=True)
