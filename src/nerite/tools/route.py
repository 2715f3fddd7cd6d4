"""``nerite route``: a router in front of pools of servers, from a cluster file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from nerite.cli.command import new_parser, show, status_of
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
    parser.add_argument("--check", action="store_true", help="validate the file and the files it names, and exit")
    return parser


def _route(options: argparse.Namespace) -> int:
    settings = read_cluster(options.file)
    if options.check:
        return _check(settings)
    # Imported here, because --check need not load the code that serves.
    from nerite.observability.log import install_logging, log
    from nerite.router import process

    install_logging(log)
    return process.run(settings)


def _check(settings: ClusterSettings) -> int:
    """Print what the file says, one line for each pool. Raises ``InvalidArgument`` for mistakes in named files."""
    from nerite.router.discovery import check_sources

    if mistakes := check_sources(settings.pools):
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
    if source.models:
        return f"{source.replicas} local servers of {source.models}"
    return f"{len(source.members)} members"
