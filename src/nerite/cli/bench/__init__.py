"""``nerite bench``: how fast a model is, and at what latency."""

from nerite.cli.bench.command import run

__all__ = ["run"]
