"""``nerite analyze``: the configuration with which a model answers most."""

from nerite.cli.analyze.command import run

__all__ = ["run"]
