"""``nerite show``: shows a model of a repository."""

from nerite.cli.show.command import run

__all__ = ["run"]
