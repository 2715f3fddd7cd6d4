"""``nerite pick``: an endpoint picker for gateways such as Envoy, from a cluster file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from nerite.cli.command import new_parser, status_of
from nerite.cluster.cluster_file import read_cluster
from nerite.core.errors import InvalidArgument

_PORT: Final = 9002
_METRICS_PORT: Final = 9090
USED: Final = ("max-body", "max-bytes-in-flight", "connect-timeout", "exit-timeout", "max-connections")
"""Keys of ``[router]`` that have an effect."""
_EPILOG: Final = """\
The gateway asks the picker over ext_proc (Endpoint Picker Protocol 1.0) where each request goes, and carries the data.
The cluster file is that of nerite route; of its table [router], a picker uses max-body, max-bytes-in-flight,
connect-timeout, exit-timeout and max-connections.

Example:
  nerite pick cluster.toml --port 9002
"""


def run(arguments: Sequence[str]) -> int:
    """Pick endpoints until a signal arrives; return the exit status."""
    return status_of("nerite pick", lambda: _pick(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite pick", "Pick the endpoints of requests for a gateway.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="cluster file, such as cluster.toml")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=_PORT, help=f"port for gateways (default: {_PORT})")
    parser.add_argument(
        "--metrics-port", type=int, default=_METRICS_PORT, help=f"port for metrics (default: {_METRICS_PORT})"
    )
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="let requests choose their endpoint by a header, as tests of the protocol do; not for production",
    )
    return parser


def _pick(options: argparse.Namespace) -> int:
    for name in ("port", "metrics_port"):
        if not 0 <= getattr(options, name) <= 65535:
            flag = name.replace("_", "-")
            raise InvalidArgument(f"--{flag} {getattr(options, name)} is not a port: give a number from 1 to 65535")
    settings = read_cluster(options.file)
    # Imported here, because --help need not load the code that serves.
    from nerite.observability.log import install_logging, log
    from nerite.picker import process

    install_logging(log)
    return process.run(
        settings, process.PickerPorts(options.address, options.port, options.metrics_port, options.conformance)
    )
