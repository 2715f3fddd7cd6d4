"""``nerite top``: what a running server does, again and again, on the whole of a terminal."""

from nerite.cli.top.command import run

__all__ = ["run"]
