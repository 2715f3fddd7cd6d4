"""``nerite route``: a router in front of pools of servers, from a cluster file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nerite.cli.command import UsageError, new_parser, show, status_of
from nerite.cluster.cluster_file import read_cluster
from nerite.cluster.settings import ClusterSettings, MemberSource
from nerite.core.errors import InvalidArgument

_EPILOG: Final = """\
The cluster file is described in docs/router.md. A minimal one:

  [[pool]]
  name = "main"
  members = ["10.0.0.1:8000", "10.0.0.2:8000"]

Examples:
  nerite route cluster.toml
  nerite route --check cluster.toml
"""


def run(arguments: Sequence[str]) -> int:
    """Route requests until a signal arrives; return the exit status."""
    return status_of("nerite route", lambda: _route(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite route", "Route requests to pools of servers.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="cluster file, such as cluster.toml")
    parser.add_argument(
        "--members",
        metavar="POOL=FILE",
        action="append",
        default=[],
        help="read the members of a pool from a file instead, once for each pool",
    )
    parser.add_argument("--check", action="store_true", help="validate the file and the files it names, and exit")
    return parser


def _route(options: argparse.Namespace) -> int:
    settings = with_members(read_cluster(options.file), options.members)
    if options.check:
        return _check(settings)
    # Imported here, because --check need not load the code that serves.
    from nerite.observability.log import install_logging, log
    from nerite.router import process

    install_logging(log)
    return process.run(settings)


def with_members(settings: ClusterSettings, given: Sequence[str]) -> ClusterSettings:
    """Return settings in which pools have the given members files. Raises ``UsageError`` for an unknown pool."""
    files = dict(_pool_and_file(each) for each in given)
    names = [pool.name for pool in settings.pools]
    for name in files:
        if name not in names:
            raise UsageError(f"--members names pool '{name}', and {settings.path} has {', '.join(names)}")
    pools = (
        replace(pool, source=MemberSource(file=files[pool.name])) if pool.name in files else pool
        for pool in settings.pools
    )
    return replace(settings, pools=tuple(pools))


def _pool_and_file(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise UsageError(f"--members must be POOL=FILE, not '{text}'")
    return name, file


def _check(settings: ClusterSettings) -> int:
    """Print what the file says, one line for each pool. Raises ``InvalidArgument`` for mistakes in named files."""
    from nerite.admission.policy_file import open_policy
    from nerite.router.discovery import check_sources
    from nerite.router.member_tls import check_contexts
    from nerite.router.pool_process import open_lock
    from nerite.router.process import first_key, port_contexts

    if settings.router.policy_file:
        open_policy(settings.router.policy_file)
    port_contexts(settings.router)
    first_key(settings.router.member_key_file)
    asked = [asked for pool in settings.pools for asked in (pool.placement, pool.rollout) if asked is not None]
    for key in filter(None, (settings.router.admin_key, *(each.key for each in asked))):
        open_lock(key)
    if mistakes := [*check_sources(settings.pools), *check_contexts(settings.pools)]:
        raise InvalidArgument("\n".join(mistakes))
    for pool in settings.pools:
        show(f"pool {pool.name}: {pool.kind}, {_source_text(pool.source)}, {pool.balancing.choice}")
    show(f"{settings.path} is valid")
    return 0


def _source_text(source: MemberSource) -> str:
    if source.file:
        return f"members in {source.file}"
    if source.dns:
        return f"members at the addresses of {source.dns}"
    if source.kubernetes is not None:
        return f"members at the endpoints of service {source.kubernetes}"
    if source.ray:
        return f"members in Ray, of {source.ray}"
    if source.models:
        return f"{source.replicas} local servers of {source.models}"
    return f"{len(source.members)} members"
