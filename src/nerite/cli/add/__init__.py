"""``nerite add``: brings a trained model into a repository."""

from nerite.cli.add.command import run

__all__ = ["run"]
