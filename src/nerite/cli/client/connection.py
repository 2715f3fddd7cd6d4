"""The options of every command that asks a server: where it is, and what goes with each request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from nerite.client import Client, ClientError
from nerite.client.error import Unreachable


def add_connection(parser: argparse.ArgumentParser, url: str | None = None) -> None:
    """Add the options, with ``url`` for where the server is. Without that, what is not given leaves no trace."""
    group = parser.add_argument_group("the server")
    where = "HOST:PORT of its HTTP port, or a URL (default: localhost:8000)"
    group.add_argument("--url", metavar="URL", default=argparse.SUPPRESS, help=where)
    group.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        type=_header,
        default=argparse.SUPPRESS,
        help="a header for each request; may be given several times",
    )
    limit = "how long to wait for an answer (default: 60)"
    group.add_argument("--timeout", metavar="SECONDS", type=float, default=argparse.SUPPRESS, help=limit)
    if url is not None:
        parser.set_defaults(url=url, header=[], timeout=60.0)


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server that the options name. Where nobody is there, what is raised says what to do."""
    with remedied("HTTP"), Client(options.url, headers=dict(options.header), timeout=options.timeout) as client:
        yield client


@contextmanager
def remedied(port: str) -> Iterator[None]:
    """Say what to do where a server cannot be reached. ``port``: what its port has to be for."""
    try:
        yield
    except Unreachable as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "Name the certificate of the authority that the server's is from: SSL_CERT_FILE=ca.pem."
        else:
            remedy = f"Is a server running there? Name another with --url HOST:PORT (the port for {port})."
        raise ClientError(f"{error}\n    {remedy}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no header: write NAME: VALUE")
    return name.strip(), value.strip()
