"""How commands reach a running server: ``--url``, ``--header`` and ``--timeout``, and the client made from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from nerite.client import Client, ClientError
from nerite.client.connection import Unreachable

DEFAULT_URL: Final = "localhost:8000"


def add_connection(parser: argparse.ArgumentParser, url: str | None = DEFAULT_URL) -> None:
    """Add the options needed to reach a server. Without ``url``, the default URL, no defaults are set."""
    group = parser.add_argument_group("connection")
    where = f"HOST:PORT of the server's HTTP port, or a URL (default: {DEFAULT_URL})"
    group.add_argument("--url", metavar="URL", default=argparse.SUPPRESS, help=where)
    group.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        type=read_header,
        default=argparse.SUPPRESS,
        help="header to send with each request; may be repeated",
    )
    limit = "how long to wait for a response (default: 60)"
    group.add_argument("--timeout", metavar="SECONDS", type=float, default=argparse.SUPPRESS, help=limit)
    if url is not None:
        parser.set_defaults(url=url, header=[], timeout=60.0)


def read_header(text: str) -> tuple[str, str]:
    """Parse a header of the command line."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is not a header: write NAME: VALUE")
    return name.strip(), value.strip()


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server that the options name. Errors for an unreachable server include a remedy."""
    with remedied("HTTP"), Client(options.url, headers=dict(options.header), timeout=options.timeout) as client:
        yield client


@contextmanager
def remedied(port: str) -> Iterator[None]:
    """Add a remedy to errors for an unreachable server. ``port`` is the protocol that its port must speak."""
    try:
        yield
    except Unreachable as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "Specify the certificate of the authority that issued the server's: SSL_CERT_FILE=ca.pem."
        else:
            remedy = f"Is a server running there? Specify another with --url HOST:PORT (its {port} port)."
        raise ClientError(f"{error}\n    {remedy}") from error
