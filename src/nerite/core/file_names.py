"""File names that a configuration gives, which have to stay within the directory that they belong in."""

from __future__ import annotations

import posixpath
from pathlib import PurePath

from nerite.core.errors import InvalidArgument


def leads_out(name: str) -> bool:
    """Return whether a path leads out of the directory that it is relative to.

    Links are not followed: those who write a repository make them, and a configuration may be a client's.
    """
    normal = posixpath.normpath(name)
    return normal == ".." or normal.startswith(("/", "../")) or "\0" in name


def check_within(name: str, what: str, directory: PurePath | str) -> None:
    """Raise ``InvalidArgument`` if ``name`` leads out of ``directory``; ``what`` says what it is the name of."""
    if leads_out(name):
        raise InvalidArgument(f"{what} must stay within {directory}")
