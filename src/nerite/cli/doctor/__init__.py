"""``nerite doctor``: what is wrong on this machine, or soon will be, and what cures it."""

from nerite.cli.doctor.command import run

__all__ = ["run"]
