"""Files that may change while the server runs. Whoever has one decides what of it is in force; here it is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

_Finding = TypeVar("_Finding")
_Finding_contra = TypeVar("_Finding_contra", contravariant=True)
_LOOK_EVERY: Final = 0.5
"""Seconds between two looks at a file."""


class StandingFile(Protocol[_Finding_contra]):
    """One of them, as of the last time that it was in order."""

    path: str

    @property
    def problem(self) -> str:
        """What is wrong with it, for which reason what is in force is older than it; empty if nothing is."""

    def see(self, found: _Finding_contra) -> bool:
        """Take what a look found; return whether that was news."""

    def news(self) -> str:
        """Return what to say in the log after a change."""


async def watch(file: StandingFile[_Finding], look: Callable[[str], _Finding], changed: Callable[[], None]) -> None:
    """Look at a file every now and then, and call ``changed`` after news. ``look`` blocks as files do."""
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        if file.see(await asyncio.to_thread(look, file.path)):
            changed()
