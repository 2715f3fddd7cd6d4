"""``nerite chat``: talks with a text model of a running server."""

from nerite.cli.chat.command import run

__all__ = ["run"]
