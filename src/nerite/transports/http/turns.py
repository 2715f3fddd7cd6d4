"""Long work on the loop, in turns: requests are answered in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_TURN: Final = 0.0005
"""Seconds of the loop that the work takes at once: requests wait no longer for it, however much there is."""


class Turns:
    """Those of one piece of work."""

    def __init__(self) -> None:
        self._over = time.monotonic() + _TURN

    async def go_on(self) -> None:
        """Return when there is time."""
        if time.monotonic() >= self._over:
            await asyncio.sleep(0)
            self._over = time.monotonic() + _TURN
