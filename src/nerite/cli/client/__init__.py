"""``nerite client``: asks a running server, with a file for each of its commands."""

from nerite.cli.client.command import run

__all__ = ["run"]
