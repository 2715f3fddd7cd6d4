"""``nerite ray``: a whole cluster file on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from nerite.admission.policy_file import open_policy
from nerite.cli.command import UsageError, new_parser, positive_number, show, status_of
from nerite.cluster.cluster_file import read_cluster
from nerite.core.errors import NeriteError, NotFound, Unavailable
from nerite.ray.actors import GRACE, with_paths
from nerite.ray.controller import Controller
from nerite.ray.plan import CONTROLLER, ROUTER, RayPlan, namespace_of, plan_text, ray_plan
from nerite.ray.ray_cluster import RayCluster, connect

_EPILOG: Final = """\
up starts a server for each replica of the pools that have models, each an actor with a placement group of its own, and
the router on this node. It returns when everything is ready; everything goes on until down. Given the same file again,
it changes nothing; given another one, it replaces what has changed. Nerite and the models must be on all nodes.

Examples:
  nerite ray up cluster.toml --plan
  nerite ray up cluster.toml
  nerite ray status cluster.toml
  nerite ray down cluster.toml
"""
_POLL: Final = 0.5
_ANSWER_SECONDS: Final = 30.0
_REPEAT_SECONDS: Final = 10.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return status_of("nerite ray", lambda: _run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite ray", "Run a whole cluster file on the nodes of a Ray cluster.", _EPILOG)
    parser.add_argument(
        "action",
        choices=["up", "status", "down", "members"],
        help="members prints the members of NAME/POOL whenever they change, a JSON object on a line, for routers",
    )
    parser.add_argument("file", metavar="FILE", help="cluster file, such as cluster.toml; for members: NAME/POOL")
    parser.add_argument("--plan", action="store_true", help="up: print what would be started, and exit")
    parser.add_argument("--name", default="", help="name of the cluster in Ray (default: that of the file)")
    parser.add_argument("--address", default="", help="cluster of Ray (default: RAY_ADDRESS, or that of this machine)")
    parser.add_argument("--no-router", action="store_true", help="up: start no router, as routers run elsewhere")
    parser.add_argument(
        "--wait", type=positive_number, default=600.0, help="up: seconds to wait until everything is ready (600)"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.plan and options.action != "up":
        raise UsageError(f"--plan has an effect with up only, not with {options.action}")
    if options.action == "members":
        return _members(options)
    name = options.name or Path(options.file).stem
    if not _NAME.fullmatch(name):
        raise UsageError(f"the name of the cluster must be 1 to 64 letters, digits or ._-, not '{name}': give --name")
    if options.action == "up":
        return _up(options, name)
    connect(namespace_of(name), options.address)
    cluster = RayCluster(namespace_of(name))
    return _status(cluster, name) if options.action == "status" else _down(cluster, name)


def _up(options: argparse.Namespace, name: str) -> int:
    settings = with_paths(read_cluster(os.path.abspath(options.file)))
    if settings.router.policy_file:
        open_policy(settings.router.policy_file)  # its mistakes are told before anything starts
    plan = ray_plan(settings, name)
    show(plan_text(plan))
    if options.no_router and any(pool.rollout for pool in settings.pools):
        show("the routers elsewhere lead rollouts: [pool.rollout] has to be in their cluster files, too")
    if options.plan:
        return 0
    connect(namespace_of(name), options.address)
    cluster = RayCluster(namespace_of(name))
    if not options.no_router:
        plan = ray_plan(settings, name, cluster.node)
    controller = _controller(cluster, plan)
    _wait(cluster, controller, options.wait, name)
    router = settings.router
    if options.no_router:
        show(f'everything is ready: routers find the servers with ray = "{name}/POOL"')
    else:
        host = cluster.nodes()[cluster.node].address if router.address in ("0.0.0.0", "::") else router.address
        show(f"everything is ready: requests go to http://{host}:{router.http_port}")
    return 0


def _controller(cluster: RayCluster, plan: RayPlan) -> Any:
    """Return the controller of this plan; one of another plan is replaced, and takes over what there is."""
    found = cluster.find(CONTROLLER)
    if found is not None:
        try:
            if cluster.result(found.digest.remote(), _ANSWER_SECONDS) == plan.digest:
                return found
        except (cluster.errors.RayActorError, cluster.errors.GetTimeoutError):
            show("the controller does not answer and is replaced")
        _kill_controller(cluster)
    return cluster.create(Controller, CONTROLLER, plan)


def _kill_controller(cluster: RayCluster) -> None:
    """End the controller, and wait until its name is free."""
    cluster.kill(CONTROLLER)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while cluster.find(CONTROLLER) is not None:
        if time.monotonic() > deadline:
            raise Unavailable("the controller does not end: try again")
        time.sleep(_POLL / 5)


def _wait(cluster: RayCluster, controller: Any, seconds: float, name: str) -> None:
    """Wait until everything is ready, and say what is."""
    deadline = time.monotonic() + seconds
    said: dict[str, str] = {}
    while True:
        report = _asked(cluster, controller)
        states = {server: text for pool in report["pools"] for server, text in pool["servers"].items()}
        states |= {ROUTER: report["router"]} if report["router"] else {}
        for server, text in states.items():
            if said.get(server) != text:
                show(f"{server} {text}")
        said = states
        if report["ready"]:
            return
        if time.monotonic() > deadline:
            missing = [server for server, text in states.items() if not text.startswith(("ready", "stands"))]
            raise Unavailable(
                f"not ready after {seconds:g} s: {', '.join(missing)}. They go on starting, and what they print is in "
                f"the logs of Ray on their nodes: nerite ray status {name}"
            )
        time.sleep(_POLL)


def _asked(cluster: RayCluster, controller: Any) -> dict[str, Any]:
    try:
        report: dict[str, Any] = cluster.result(controller.report.remote(), _ANSWER_SECONDS)
    except (cluster.errors.RayError, cluster.errors.GetTimeoutError) as error:
        text = str(error).strip().splitlines()[-1]
        raise Unavailable(f"the controller does not answer: {text}") from None
    return report


def _status(cluster: RayCluster, name: str) -> int:
    """Print the state of everything; return 0 if everything is ready."""
    controller = cluster.find(CONTROLLER)
    if controller is None:
        raise NotFound(f"nothing runs under the name {name} in Ray: start it with nerite ray up")
    report = _asked(cluster, controller)
    for pool in report["pools"]:
        show(f"pool {pool['name']}: {pool['ready']} of {pool['wanted']} ready")
        for server, text in pool["servers"].items():
            show(f"  {server} {text}")
    for server in report["ending"]:
        show(f"  {server} drains")
    if report["router"]:
        show(f"router: {report['router']}")
    return 0 if report["ready"] else 1


def _down(cluster: RayCluster, name: str) -> int:
    """End everything, the router first, and wait for it."""
    names = cluster.names()
    if not names and not cluster.groups():
        show(f"nothing runs under the name {name} in Ray")
        return 0
    if CONTROLLER in names:
        _kill_controller(cluster)
    servers = sorted(set(names) - {CONTROLLER, ROUTER})
    for group in ([ROUTER] if ROUTER in names else [], servers):
        handles = {each: cluster.find(each) for each in group}
        calls = {each: handle.drain.remote() for each, handle in handles.items() if handle is not None}
        for each in group:
            try:
                if each in calls:
                    cluster.result(calls[each], _ANSWER_SECONDS + 2 * GRACE)
            except (cluster.errors.RayError, cluster.errors.GetTimeoutError):
                show(f"{each} does not answer and is killed")
            cluster.kill(each)
            show(f"{each} has ended")
    for left in cluster.groups():
        cluster.kill(left)
    return 0


def _members(options: argparse.Namespace) -> int:
    """Print the members of a pool whenever they change, and after a while again: a reader may have gone."""
    name, slash, pool = options.file.partition("/")
    if not slash or not _NAME.fullmatch(name):
        raise UsageError(f"members needs NAME/POOL, as in platform/interactive, not '{options.file[:80]}'")
    connect(namespace_of(name), options.address)
    cluster = RayCluster(namespace_of(name))
    number = -1
    while True:
        try:
            controller = cluster.find(CONTROLLER)
            if controller is None:
                raise NotFound(f"nothing runs under the name {name} in Ray: start it with nerite ray up")
            call = controller.members.remote(pool, number, _REPEAT_SECONDS)
            number, lines = cluster.result(call, _ANSWER_SECONDS)
            print(json.dumps({"members": lines}), flush=True)
        except NeriteError as error:
            print(json.dumps({"problem": error.message}), flush=True)
            time.sleep(1)
        except (cluster.errors.RayError, cluster.errors.GetTimeoutError) as error:
            print(json.dumps({"problem": str(error).strip().splitlines()[-1][:500]}), flush=True)
            number = -1
            time.sleep(1)
